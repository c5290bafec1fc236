"""Streamed text is the decoded text, whatever the tokens, and stops where the whole text would be cut."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headwater.engine.detokenizer import StopStrings, TextStream, ThoughtText, byte_table
from headwater.request import SamplingParams, Thought

SAMPLE = [
    "the cat sat on the mat, the cat ran",
    "Grüße aus Köln — naïve façade",
    "日本語のテキスト 🙂🙃",
    "a  b\n\n c\t",
]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words é", special=False)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "▁the": 2, "▁cat": 3, "s": 4, "a": 5, "b": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_tokens([f"<0x{b:02X}>" for b in range(256)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, str | None]:
    text_stream = TextStream(tokenizer, (), SamplingParams(stop=stop))
    pieces = []
    for token in tokens:
        text, hit = text_stream.push(token)
        pieces.append(text)
        if hit is not None:
            return "".join(pieces), hit
    return "".join([*pieces, text_stream.flush()]), None


def naive_cut(text: str, stop: tuple[str, ...]) -> str:
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


any_tokens = st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=40)
likely_stops = st.lists(st.text("the catGrüß日本🙂<> \n\ufffd", min_size=1, max_size=6), max_size=4).map(tuple)


@given(any_tokens)
def test_pieces_join_to_the_full_decode_of_any_token_sequence(tokens):
    assert stream(byte_level(), tokens)[0] == byte_level().decode(tokens, skip_special_tokens=True)


@given(any_tokens, likely_stops)
def test_text_is_cut_where_the_full_text_would_be(tokens, stop):
    full = byte_level().decode(tokens, skip_special_tokens=True)
    assert stream(byte_level(), tokens, stop)[0] == naive_cut(full, stop)


@given(st.data())
def test_stop_string_is_found_across_token_borders(data):
    text = data.draw(st.sampled_from(SAMPLE))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    tokens = byte_level().encode(text).ids
    assert stream(byte_level(), tokens, (stop,)) == (text[: text.find(stop)], stop)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_the_cuts_of_the_text(pieces, stop):
    def run(parts):
        strings, shown = StopStrings(tuple(stop)), ""
        for part in parts:
            text, hit = strings.push(part)
            shown += text
            if hit is not None:
                return shown, hit
        return shown + strings.flush(), None

    assert run(pieces) == run(list("".join(pieces)))


def test_a_character_of_several_tokens_appears_whole():
    tokens = byte_level().encode("é🙂").ids
    single_bytes = [byte_level().token_to_id(c) for c in "ðŁĻĤ"]
    pieces = TextStream(byte_level(), (), SamplingParams())
    assert [pieces.push(t)[0] for t in single_bytes] == ["", "", "", "🙂"]
    assert stream(byte_level(), tokens)[0] == "é🙂"


def test_an_incomplete_character_comes_out_at_the_end_as_a_replacement():
    text_stream = TextStream(byte_level(), (), SamplingParams())
    assert text_stream.push(byte_level().token_to_id("ð")) == ("", None)
    assert text_stream.flush() == "\ufffd"
    assert text_stream.flush() == ""


def test_special_tokens_are_not_shown_and_other_added_tokens_are():
    tokens = byte_level().encode("a<think>b<|im_end|>two words é").ids
    assert stream(byte_level(), tokens)[0] == "a<think>btwo words é"


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
def test_special_tokens_that_are_asked_for_are_shown(tokenizer):
    tokenizer = Tokenizer.from_str(tokenizer().to_str())
    tokenizer.add_special_tokens(["<call>", "<end>"])
    tokens = tokenizer.encode("s<call>ab<end>").ids
    shown = SamplingParams(shown_tokens=(tokenizer.token_to_id("<call>"),))
    text_stream = TextStream(tokenizer, (), shown)
    assert "".join([text_stream.push(t)[0] for t in tokens]) + text_stream.flush() == "s<call>ab"


def test_ids_beyond_the_tokenizer_have_no_text():
    beyond = byte_level().get_vocab_size() + 5
    assert stream(byte_level(), [beyond, byte_level().token_to_id("a")])[0] == "a"


def test_a_possible_stop_string_is_held_back_and_given_after_all():
    text_stream = TextStream(byte_level(), (), SamplingParams(stop=("the dog",)))
    shown = "".join(text_stream.push(t)[0] for t in byte_level().encode("see the").ids)
    assert shown == "see "
    assert text_stream.flush() == "the"


@pytest.mark.parametrize("prompt", [[], [2]])
def test_other_tokenizers_keep_their_leading_spaces(prompt):
    tokens = [2, 3, 4, *(metaspace().token_to_id(f"<0x{b:02X}>") for b in "é".encode()), 3]
    text_stream = TextStream(metaspace(), prompt, SamplingParams(stop=("tsx",)))
    text = "".join([text_stream.push(t)[0] for t in tokens]) + text_stream.flush()
    assert metaspace().decode(prompt) + text == metaspace().decode(prompt + tokens)


def test_a_table_is_made_once_and_only_for_byte_level_tokenizers():
    assert byte_table(byte_level()) is byte_table(byte_level())
    assert byte_table(metaspace()) is None


@pytest.mark.parametrize(
    ("begun", "text", "shown"),
    [
        (True, "so STOP.</think>\nyes STOP no", "so STOP.</think>\nyes "),
        (True, "so STOP, endless", "so STOP, endless"),
        (False, "<think>a STOP b</think>c STOP d", "<think>a STOP b</think>c "),
        (False, "\n<think>a STOP", "\n<think>a STOP"),
        (False, "<thin STOP", "<thin "),
        (False, "yes STOP </think>", "yes "),
        (False, " ", " "),
        (False, "<thi", "<thi"),
    ],
)
def test_stop_strings_are_looked_for_after_the_thought(begun, text, shown):
    params = SamplingParams(stop=("STOP",), thought=Thought("<think>", "</think>", begun))
    decoded, stopped = TextStream(byte_level(), (), params), False
    pieces = []
    for token in byte_level().encode(text).ids:
        piece, hit = decoded.push(token)
        pieces.append(piece)
        if hit is not None:
            stopped = True
            break
    assert "".join(pieces) + ("" if stopped else decoded.flush()) == shown


@given(st.text("a<t>/", max_size=12), st.lists(st.integers(0, 12)), st.booleans())
def test_cuts_of_the_text_do_not_change_where_the_thought_ends(text, cuts, begun):
    def run(pieces):
        thought = ThoughtText(Thought("<t>", "</t>", begun))
        parts = [*(thought.split(piece) for piece in pieces), thought.split("", ended=True)]
        return "".join(one for one, _ in parts), "".join(other for _, other in parts)

    edges = [0, *sorted(cuts), len(text)]
    assert run([text[a:b] for a, b in pairwise(edges)]) == run([text])

"""Prompts with segments: tokens and spans are those of an encoding by hand."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from headwater.config import ServeConfig
from headwater.request import Fidelity
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import conversation
from headwater.server.requests.sampling import MAX_SEGMENTS
from headwater.setting import SettingError
from tests.server import templates
from tests.server.client import error, send, send_all
from tests.server.fake_engine import FakeEngine, byte_tokenizer
from tests.server.prompt.segmented import SEP, TOKENIZERS, held_tokenizer, ids_of, segment, shown, spans, text, user
from tests.server.prompt.test_encoding import metaspace

HEAD, TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
BOTH = pytest.mark.parametrize("tokenizer", TOKENIZERS)


def prepare(tokenizer, messages, template=templates.SILENT, **more):
    prompter = ChatPrompter(tokenizer, ChatTemplate(template), SegmentEncoder(tokenizer))
    return prompter.prepare(conversation(messages, **more))


@pytest.mark.parametrize(
    ("prompt", "cut_out", "kept"),
    [
        (f"sys{SEP}one{SEP}two{SEP}ask", spans((3, 6), (6, 9)), spans((3, 7), (7, 11))),
        (f"{SEP}one{SEP}two{SEP}ask", spans((3, 6)), spans((4, 8))),  # the first is the leading part
        (f"sys{SEP}one{SEP}", spans((3, 6)), spans((3, 7))),  # nothing is asked
        (f"{SEP}one{SEP}", spans((0, 3)), spans((0, 4))),  # sent to be stored
        (f"sys{SEP}ask", (), ()),
        (f"sys{SEP}{SEP}ask", (), spans((3, 4))),  # of the separator only
        (SEP, (), ()),
        ("sys", (), ()),
        ("", (), ()),
    ],
)
def test_spans_of_a_completions_prompt(prompt, cut_out, kept):
    for tokenizer, expected in zip(TOKENIZERS, (cut_out, kept), strict=True):
        encoder = SegmentEncoder(tokenizer())
        encoded = encoder.encode_prompt(prompt)
        parts = [piece for part in prompt.split(SEP) for piece in (SEP, part)][1:]
        assert encoded.ids == ids_of(tokenizer(), *parts)
        assert encoded.segments == expected
    assert encoder.segments_of(encoded.ids) == kept  # where the separator is a token, ids say the same as text


def test_tokens_that_begin_and_end_a_text_belong_to_no_segment():
    tokenizer = held_tokenizer().from_str(held_tokenizer().to_str())
    marks = [(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", None, marks)
    encoder = SegmentEncoder(tokenizer)
    encoded = encoder.encode_prompt(f"{SEP}one{SEP}two{SEP}ask")
    inner = ids_of(tokenizer, SEP, "one", SEP, "two", SEP, "ask")
    assert encoded.ids == (marks[0][1], *inner, marks[1][1])
    assert encoded.segments == spans((5, 9))
    assert encoder.segments_of(encoded.ids) == encoded.segments
    assert encoder.encode_prompt(f"{SEP}one{SEP}").segments == spans((1, 5))
    assert encoder.encode_prompt(f"{SEP}one{SEP}", add_special_tokens=False).segments == spans((0, 4))


WORDS = st.text(st.sampled_from("ab \né<|segmnt>"), max_size=6) | st.sampled_from(["<|im_start|>", "the cat", "<|seg"])
texts = st.lists(WORDS, max_size=6).map(lambda parts: parts or [""])


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS, metaspace])
@given(parts=texts)
def test_prompt_tokens_are_its_parts_tokens_and_spans_never_overlap(tokenizer, parts):
    encoder = SegmentEncoder(tokenizer())
    encoded = encoder.encode_prompt(SEP.join(parts), add_special_tokens=False)
    leading, *others = (encoder.encode_segment(part) for part in parts)
    held = () if tokenizer().token_to_id(SEP) is None else (tokenizer().token_to_id(SEP),)
    leading = leading[len(held) :]
    assert encoded.ids == sum(others, leading)
    assert len(encoded.ends) == len(encoded.ids)
    assert list(encoded.ends) == sorted(encoded.ends)
    at, expected = len(leading), []
    for ids in others[:-1]:
        alone = len(others) == 2 and others[-1] == held
        if ids and (at or alone):
            expected.append((at, at + len(ids)))
        at += len(ids)
    assert encoded.segments == spans(*expected)
    for before, after in zip(encoded.segments, encoded.segments[1:], strict=False):
        assert before.start < before.end <= after.start < after.end


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS, metaspace])
@given(neighbours=st.lists(st.text("ab <|>", max_size=5), min_size=4, max_size=4))
def test_segments_tokens_do_not_depend_on_its_neighbours(tokenizer, neighbours):
    encoder = SegmentEncoder(tokenizer())
    a, b, c, d = neighbours
    for prompt in (f"x{a}{SEP}{b}{SEP}ab abb{SEP}{c}", f"x{d}{SEP}ab abb{SEP}{b}"):
        encoded = encoder.encode_prompt(prompt, add_special_tokens=False)
        last = encoded.segments[-1]
        assert encoded.ids[last.start : last.end] == encoder.encode_segment("ab abb")


CONTENTS = [
    ([segment("one"), text("ask")], f"{SEP}one{SEP}ask", ["one"]),
    ([text("see "), segment("one"), segment("two"), text(" ask")], f"see {SEP}one{SEP}two{SEP} ask", ["one", "two"]),
    ([text("see"), segment("one")], f"see{SEP}one{SEP}", ["one"]),
    ([text(f"{SEP}one{SEP}"), segment("two"), text("ask")], f"{SEP}one{SEP}two{SEP}ask", ["one", "two"]),
    ([segment("one"), text(f"{SEP}two{SEP}ask")], f"{SEP}one{SEP}two{SEP}ask", ["one", "two"]),
    ([text("see"), text(f"{SEP}one"), text(f"{SEP}ask")], f"see{SEP}one{SEP}ask", ["one"]),
]


@BOTH
@pytest.mark.parametrize(("parts", "by_hand", "segments"), CONTENTS)
def test_parts_that_are_segments_are_separators_written_by_hand(tokenizer, parts, by_hand, segments):
    tokenizer = tokenizer()
    written, said = prepare(tokenizer, [user(by_hand)]), prepare(tokenizer, [user(parts)])
    assert said.prompt == written.prompt
    assert said == written
    assert shown(tokenizer, said.prompt, said.segments) == segments
    pieces = [piece for part in by_hand.split(SEP) for piece in (SEP, part)][1:]
    assert said.prompt == ids_of(tokenizer, HEAD + pieces[0], *pieces[1:-1], pieces[-1] + TAIL)


@BOTH
def test_text_between_segments_is_tokenised_alike_but_not_a_segment(tokenizer):
    tokenizer = tokenizer()
    said = prepare(tokenizer, [user([segment("one"), text("and"), segment("two"), text("ask")])])
    written = prepare(tokenizer, [user(f"{SEP}one{SEP}and{SEP}two{SEP}ask")])
    assert said.prompt == written.prompt
    assert shown(tokenizer, said.prompt, said.segments) == ["one", "two"]
    assert shown(tokenizer, written.prompt, written.segments) == ["one", "and", "two"]


@BOTH
def test_text_between_two_messages_is_not_a_segment(tokenizer):
    tokenizer, turn = tokenizer(), [user(f"{SEP}one{SEP}ask"), {"role": "assistant", "content": "1"}]
    prompt = prepare(tokenizer, [*turn, user(f"{SEP}two{SEP}again")])
    assert shown(tokenizer, prompt.prompt, prompt.segments) == ["one", "two"]
    ending = prepare(tokenizer, [*turn, user("again")]).prompt[-4:]
    assert prompt.prompt[-4:] == ending


@BOTH
@pytest.mark.parametrize("template", [templates.SILENT, templates.REASONING, templates.DEFAULT_SYSTEM])
def test_boundaries_are_found_around_segments(tokenizer, template):
    tokenizer = tokenizer()
    system = {"role": "system", "content": [text("Be brief."), segment("a skill"), text("!")]}
    prompt = prepare(tokenizer, [system, user([segment("a document"), text("ask")])], template)
    assert shown(tokenizer, prompt.prompt, prompt.segments) == ["a skill", "a document"]
    document = prompt.segments[1]
    assert prompt.segments[0].end < prompt.boundaries.system_end < document.start
    assert document.end < prompt.boundaries.query_end < len(prompt.prompt)


@BOTH
def test_breakpoint_moves_with_the_text_that_it_is_in(tokenizer):
    tokenizer, mark = tokenizer(), {"cache_control": {"type": "ephemeral"}}
    prompt = prepare(tokenizer, [user([segment("one"), {**segment("two"), **mark}, text("ask")])])
    assert prompt.boundaries.extra == (prompt.segments[1].end - 1,)
    prompt = prepare(tokenizer, [user([segment("one"), {**text("read this. "), **mark}, text("ask")])])
    before = tokenizer.decode(prompt.prompt[: prompt.boundaries.extra[0] + 1], skip_special_tokens=False)
    assert before.endswith("read this. ")


def test_template_that_writes_separators_makes_segments():
    template = "{{ messages[0].content }}{% for d in ['one', 'two'] %}<|segment|>{{ d }}{% endfor %}<|segment|>ask"
    for tokenizer in TOKENIZERS:
        prompt = prepare(tokenizer(), [user("sys")], template)
        assert prompt.prompt == ids_of(tokenizer(), "sys", SEP, "one", SEP, "two", SEP, "ask")
        assert shown(tokenizer(), prompt.prompt, prompt.segments) == ["one", "two"]


# -- through the API -------------------------------------------------------------

CHAT = {"messages": [user(f"{SEP}one document{SEP}ask")]}
RESPONSE = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "one document", "segment": True},
                                                    {"type": "input_text", "text": "ask"}]}]}  # fmt: skip
COMPLETION = {"prompt": f"sys{SEP}one document{SEP}ask"}
ENDPOINTS = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE), ("/v1/completions", COMPLETION)],
)


@ENDPOINTS
def test_exact_keeps_the_tokens_and_reuses_no_segment(engine, path, body):
    for more in ({}, {"exact": True}, {"exact": False, "fidelity": "high"}, {"fidelity": "fast"}):
        assert send(engine, "POST", path, json={**body, **more}).status_code == 200
    plain, exact, high, fast = engine.seen
    assert plain.prompt == exact.prompt == high.prompt == fast.prompt
    assert shown(engine.tokenizer, plain.prompt, plain.segments) == ["one document"]
    assert exact.segments == ()
    assert plain.segments == high.segments == fast.segments
    assert [one.fidelity for one in (plain, high, fast)] == [Fidelity.BALANCED, Fidelity.HIGH, Fidelity.FAST]


@ENDPOINTS
def test_streamed_texts_are_equal_with_and_without_segments(engine, path, body):
    streamed = [
        send(engine, "POST", path, json={**body, "exact": exact, "stream": True, "max_tokens": 9}).text
        for exact in (False, True)
    ]
    pieces = [re.findall(r'"(?:text|content|delta)": ?"([^"]*)"', text) for text in streamed]
    assert pieces[0] == pieces[1]
    assert len(pieces[0]) > 2
    assert [len(one.segments) for one in engine.seen] == [1, 0]


def test_every_prompt_and_every_answer_has_its_segments(engine):
    send(engine, "POST", "/v1/completions", json={"prompt": [COMPLETION["prompt"], "sys"], "n": 2})
    assert [len(one.segments) for one in engine.seen] == [1, 1, 0, 0]


def test_prompt_that_is_scored_is_computed_whole(engine):
    body = {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = send(engine, "POST", "/v1/completions", json=body).json()["choices"]
    assert engine.seen[0].segments == ()
    assert choice["text"] == COMPLETION["prompt"]
    assert len(choice["logprobs"]["tokens"]) == len(engine.seen[0].prompt)
    engine.tokenizer = held_tokenizer()
    (again,) = send(engine, "POST", "/v1/completions", json=body).json()["choices"]
    assert again["text"] == choice["text"]
    assert SEP in again["logprobs"]["tokens"]


def test_tokenize_returns_the_spans_of_segments(engine):
    for tokenizer in TOKENIZERS:
        engine.tokenizer = tokenizer()
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            told, _ = send_all(engine, [("POST", "/tokenize", {"json": body}), ("POST", path, {"json": body})])
            seen = engine.seen[-1]
            assert tuple(told.json()["tokens"]) == seen.prompt
            assert told.json()["segments"] == [[span.start, span.end] for span in seen.segments] != []


def test_prompt_of_token_ids_has_its_segments(engine):
    engine.tokenizer = held_tokenizer()
    engine.spec.vocab_size = held_tokenizer().get_vocab_size()
    ids = list(ids_of(engine.tokenizer, "sys", SEP, "one document", SEP, "ask"))
    send(engine, "POST", "/v1/completions", json={"prompt": ids})
    send(engine, "POST", "/v1/completions", json=COMPLETION)
    assert engine.seen[0].segments == engine.seen[1].segments != ()


def test_separator_is_a_setting(engine):
    config = ServeConfig(segment_separator="##")
    send(engine, "POST", "/v1/completions", config, json={"prompt": "sys##one##ask"})
    assert engine.seen[0].segments == spans((3, 6))
    for wrong in ("", "#", "# #", "#" * 65):
        with pytest.raises(SettingError, match="2 to 64"):
            ServeConfig(segment_separator=wrong)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {**CHAT, "fidelity": "best"}, ("fidelity", "'fast', 'balanced', 'high', ", "'best'")),
        ("/v1/completions", {**COMPLETION, "exact": "yes"}, ("exact",)),
        ("/v1/completions", {"prompt": "a" + f"{SEP}b" * 1026}, ("1,025 segments", "at most 1,024")),
        ("/v1/completions", {"prompt": "a", "documents": [{"text": "b"}]}, ("documents",)),
        ("/v1/chat/completions", {"messages": [{**user("a"), "segment": True}]}, ("message 0", "parts")),
        ("/v1/chat/completions", {"messages": [{**user(None), "segment": True}]}, ("message 0", "parts")),
        ("/v1/chat/completions", {"messages": [user("a"), user([segment("")])]}, ("message 1", "0 characters")),
        ("/v1/chat/completions", {"messages": [user([text("a", segment="yes")])]}, ("message 0", "'yes'", "true")),
        ("/v1/chat/completions", {"messages": [user([{"type": "image_url", "segment": True}])]}, ("image_url",)),
    ],
)
def test_invalid_segments_are_refused_before_the_engine(engine, path, body, said):
    told = error(send(engine, "POST", path, json=body))["message"]
    assert all(words in told for words in said), told
    assert engine.seen == []


def test_maximum_number_of_segments_is_accepted():
    engine = FakeEngine(max_model_len=10_000)
    engine.start()
    body = {"prompt": "a" + f"{SEP}b" * (MAX_SEGMENTS + 1), "max_tokens": 1}
    assert send(engine, "POST", "/v1/completions", json=body).status_code == 200
    body = {**body, "prompt": body["prompt"] + f"{SEP}b", "exact": True}
    assert send(engine, "POST", "/v1/completions", json=body).status_code == 200
    engine.stop()
    assert [len(one.segments) for one in engine.seen] == [MAX_SEGMENTS, 0]


def test_segments_are_encoded_once_in_their_namespace():
    tokenizer, document = byte_tokenizer(), "a document that comes again " * 4
    seen = []

    class Counting:
        def encode_batch(self, texts, add_special_tokens):
            seen.extend(texts)
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    encoder = SegmentEncoder(Counting())
    for namespace in ("mine", "mine", "theirs"):
        encoder.encode_prompt(f"sys{SEP}{document}{SEP}ask", namespace=namespace)
    assert seen.count(document) == 2

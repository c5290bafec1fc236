"""Texts and the tokenizer of the training."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.encoding import PromptEncoder
from headwater.server.requests.messages import conversation
from training import tokenizer
from training.recipe import VOCABULARY
from training.tasks import KINDS, draw
from training.tasks.budget import estimate_prose
from training.tasks.example import TEXT
from training.tasks.recall import SEGMENT
from training.tasks.split import SPLITS
from training.tasks.text import NOVELS, fallback, held_out, passages, simple
from training.tasks.words import POOLS
from training.template import chat_template
from training.tokenizer import END_OF_TEXT, PROMPT_WEIGHT, TURN_END

TOKENIZER = tokenizer.load()
CONVERSATIONS = [kind for kind in KINDS if kind != TEXT]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_prompt_is_encoded_as_the_server_does(kind: str) -> None:
    prompter = ChatPrompter(TOKENIZER, chat_template())
    rng = random.Random(4)
    for split in SPLITS:
        example = draw(rng, 512, split, (kind,))
        ids, _ = tokenizer.encode(example)
        for turn in example.turns:
            sent = conversation(example.messages[:turn], example.tools)
            prompt = prompter.prepare(sent).prompt
            assert list(prompt) == ids[: len(prompt)]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_assistant_s_turns_and_nothing_else_are_learned(kind: str) -> None:
    example = draw(random.Random(5), 512, "train", (kind,))
    ids, weights = tokenizer.encode(example, TOKENIZER)
    assert len(ids) == len(weights)
    assert set(weights) == {1.0, PROMPT_WEIGHT}
    starts = [0, *(at for at in range(1, len(ids)) if weights[at] != weights[at - 1]), len(ids)]
    learned = [ids[a:b] for a, b in pairwise(starts) if weights[a] == 1.0]
    shown = [TOKENIZER.decode(run, skip_special_tokens=False) for run in learned]
    turns = [m for m in example.messages if m["role"] == "assistant"]
    assert len(shown) == len(turns)
    for text, message in zip(shown, turns, strict=True):
        assert text.endswith(TURN_END)
        if "tool_calls" in message:
            name = message["tool_calls"][0]["function"]["name"]
            assert text.startswith(f'<tool_call>\n{{"name": "{name}"')
        else:
            assert text.removesuffix(TURN_END) == " " + message["content"]


def test_text_is_learned_as_a_whole_and_ends() -> None:
    example = draw(random.Random(0), 256, "train", (TEXT,))
    ids, weights = tokenizer.encode(example)
    assert set(weights) == {1.0}
    assert ids[-1] == TOKENIZER.token_to_id(END_OF_TEXT)
    assert TOKENIZER.decode(ids) == example.messages[0]["content"]


def test_document_is_encoded_alike_on_its_own() -> None:
    rng = random.Random(6)
    for _ in range(6):
        example = draw(rng, 700, "train", ("single",))
        ids = tokenizer.encode(example)[0]
        for document in example.documents:
            own = TOKENIZER.encode(document, add_special_tokens=False).ids
            places = [at for at, first in enumerate(ids) if first == own[0] and ids[at : at + len(own)] == own]
            assert places


def test_tokens_and_marks() -> None:
    assert TOKENIZER.get_vocab_size() == VOCABULARY
    added = TOKENIZER.get_added_tokens_decoder().values()
    assert [token.content for token in added if token.special] == list(tokenizer.SPECIAL)
    assert SEGMENT in tokenizer.SPECIAL
    assert TOKENIZER.encode("a 417", add_special_tokens=False).tokens == ["a", "Ġ", "4", "1", "7"]
    assert PromptEncoder(TOKENIZER).encode(f"one{SEGMENT}two").ids[1] == TOKENIZER.token_to_id(SEGMENT)


def test_letters_of_codes_are_tokens_of_their_own() -> None:
    rng = random.Random(2)
    for example in (draw(rng, 512, "test", ("single",)) for _ in range(8)):
        for _, (answer,) in example.asked:
            if "-" in answer:
                assert TOKENIZER.encode(answer, add_special_tokens=False).tokens == list(answer)


@pytest.mark.parametrize("what", ["first", "last", "place", "river"])
def test_names_of_the_test_have_the_tokens_of_training_names(what: str) -> None:
    """Nearly all of them: what two syllables share with a word is sometimes another token."""
    tokens = {
        split: [TOKENIZER.encode(f" {name}", add_special_tokens=False).tokens for name in POOLS[what][split]]
        for split in SPLITS
    }
    known = {token for name in tokens["train"] for token in name}
    unknown = [name for name in tokens["test"] if not known.issuperset(name)]
    assert len(unknown) <= 0.06 * len(tokens["test"])
    assert sum(len(name) == 1 for name in tokens["train"]) <= 5  # a name that is one token could be learned by heart


def test_the_same_seed_gives_the_same_tokenizer() -> None:
    first, again, other = (tokenizer.train(vocab_size=600, seed=seed, examples=20) for seed in (1, 1, 2))
    assert first.to_str() == again.to_str()
    assert first.to_str() != other.to_str()
    assert first.get_vocab_size() == 600


def test_codes_and_whole_names_are_kept_from_training() -> None:
    small = tokenizer.train(vocab_size=1200, seed=1, examples=60)
    names = {
        f"Ġ{name}" for what in ("first", "last", "place") for name in (*POOLS[what]["train"], *POOLS[what]["test"])
    }
    assert len(names & set(small.get_vocab())) <= 2


SIMPLE = "The boat came in at noon. “We’ve been out all night,” the old man said, and tied it to the wall."
DATA = Path(__file__).parents[3] / "shared" / "data"


def write(file: Path, records: dict[str, str]) -> None:
    file.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in records.items())
    file.write_bytes(zstandard.compress(lines.encode()))


def test_documents_are_parted_and_their_signs_made_plain(tmp_path: Path) -> None:
    write(tmp_path / "text_standardebooks" / "train.jsonl.zst", {"a/1": f"I\n\nMarseilles\n\n{SIMPLE}"})
    write(tmp_path / "text_standardebooks" / "valid.jsonl.zst", {"b/1": SIMPLE.replace("boat", "cart")})
    names = [str(number) for number in range(200)]
    write(
        tmp_path / "text_python_docs" / "docs.jsonl.zst", {name: SIMPLE.replace("boat", f"no{name}") for name in names}
    )
    found = passages(tmp_path)
    plain = SIMPLE.replace("“", '"').replace("”", '"').replace("’", "'")
    assert found.novels == {"train": [[plain]], "test": [[plain.replace("boat", "cart")]]}
    assert 0 < len(found.manuals["test"]) < 30
    assert len(found.manuals["test"]) == sum(held_out(name) for name in names)
    assert len(found.manuals["train"]) + len(found.manuals["test"]) == 200


def test_text_other_than_simple_prose_is_excluded() -> None:
    assert simple(SIMPLE.replace("“", '"').replace("”", '"').replace("’", "'"))
    assert not simple("Too short.")
    assert not simple("Call ``read`` with a size, and it gives so many bytes as there are, or fewer at the end.")
    assert not simple(
        "Notwithstanding considerable disagreements, representatives unanimously acknowledged responsibility."
    )
    assert not simple("one and two and three and four and five and six " * 5 + ".")


def test_folder_without_novels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="text_standardebooks"):
        passages(tmp_path)


def test_fallback_has_both_splits() -> None:
    train, test = (set(fallback().paragraphs(split)) for split in ("train", "test"))
    assert len(train) > 3
    assert test
    assert not train & test


def test_passages_fill_their_tokens() -> None:
    count = tokenizer.counter()
    lengths = [
        len(tokenizer.encode(fallback().draw(random.Random(seed), 300, "train", count))[0]) for seed in range(10)
    ]
    assert all(220 < length <= 300 for length in lengths)


def test_real_passages_are_at_most_as_long_as_they_may_be(tmp_path: Path) -> None:
    novels = DATA / NOVELS / "valid.jsonl.zst"
    if not novels.is_file():
        pytest.skip(f"{novels} is missing")
    (tmp_path / NOVELS).mkdir()
    (tmp_path / NOVELS / novels.name).symlink_to(novels)
    found = passages(tmp_path)
    rng = random.Random(1)
    lengths = [len(tokenizer.encode(found.draw(rng, 512, "test", estimate_prose))[0]) for _ in range(40)]
    assert sum(length > 512 for length in lengths) <= 2
    assert sum(lengths) > 0.8 * 40 * 512

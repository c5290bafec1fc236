"""Splits of the training's texts, and its evaluation set."""

import json
import random
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from headwater.evaluate.items import Item, read_items
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.requests.messages import conversation
from tests.training.reader import RELATIONS, Reader, pool
from training import evaluation_set, tokenizer
from training.tasks import draw, memory, persona, smalltalk, tools
from training.tasks.chains import CHAINS
from training.tasks.documents import ASIDES, LEADS
from training.tasks.example import KINDS, RECALL
from training.tasks.recall import SEGMENT
from training.tasks.split import SPLITS, belongs, expanded, words
from training.tasks.words import NUMBERS, POOLS, Drawer
from training.template import chat_template

WORDINGS = {
    **{f"fact {name}": relation.facts for name, relation in RELATIONS.items()},
    **{f"question {name}": relation.questions for name, relation in RELATIONS.items()},
    **{f"question {chain.first.name} {chain.second.name}": chain.questions for chain in CHAINS},
    "tell": memory.TELL,
    "ask": memory.ASK,
    "ask a name": memory.ASK_NAMED,
    "who": persona.WHO,
    "call": tools.ASK,
}
FEWER = {
    "asides": ASIDES,
    "tell a name": memory.TELL_NAMED,
    "named": persona.NAMED,
    "repeat": smalltalk.REPEAT,
    **{f"style {number}": style.told for number, style in enumerate(persona.STYLES)},
}


@pytest.mark.parametrize("what", [*POOLS, "person", "town", "firm"])
def test_names_and_values_are_disjoint(what: str) -> None:
    train, test = (pool(what, split) for split in SPLITS)
    assert train
    assert test
    assert not train & test


def test_parts_of_names_are_disjoint() -> None:
    """No test surname is a training one, and so with the first part of a town's name."""
    for what in ("first", "last", "place", "river"):
        assert not set(POOLS[what]["train"]) & set(POOLS[what]["test"])


def test_numbers_are_disjoint() -> None:
    drawn = {split: set() for split in SPLITS}
    for split in SPLITS:
        drawer = Drawer(random.Random(1), split)
        for what in NUMBERS:
            drawn[split] |= {drawer.draw(what) for _ in range(150)}
    assert not drawn["train"] & drawn["test"]


def test_tools_are_disjoint_and_share_their_words() -> None:
    names = {
        split: {t.name for seed in range(300) for t in tools.draw_tools(Drawer(random.Random(seed), split), 512)}
        for split in SPLITS
    }
    assert not names["train"] & names["test"]
    parts = {split: {part for name in names[split] for part in name.split("_")} for split in SPLITS}
    assert parts["test"] <= parts["train"]


@pytest.mark.parametrize("name", WORDINGS)
def test_eight_wordings_and_held_out_ones_of_the_same_words(name: str) -> None:
    train, test = WORDINGS[name]["train"], WORDINGS[name]["test"]
    assert len(train) >= 8
    assert test
    assert not set(train) & set(test)
    assert words(test) <= words(train)


@pytest.mark.parametrize("name", FEWER)
def test_held_out_wordings_are_of_the_same_words(name: str) -> None:
    train, test = FEWER[name]["train"], FEWER[name]["test"]
    assert test
    assert not set(train) & set(test)
    assert words(test) <= words(train)


def test_leads_are_disjoint() -> None:
    assert not set(LEADS["train"]) & set(LEADS["test"])
    assert words(LEADS["test"]) <= words(LEADS["train"])


def test_answers_of_the_test_are_none_of_the_training() -> None:
    """But for the fixed ones."""
    answers = {
        split: {
            answer
            for seed in range(60)
            for _, accepted in draw(random.Random(seed), 1024, split, [k for k in KINDS if k in RECALL]).asked
            for answer in accepted
        }
        for split in SPLITS
    }
    assert answers["train"] & answers["test"] == {"Not in the documents."}


def test_text_belongs_to_one_split() -> None:
    assert all(belongs(text, "train") != belongs(text, "test") for text in map(str, range(100)))


def test_alternatives_expand() -> None:
    assert expanded("[Who|What] is [|it ]so?") == ["Who is so?", "Who is it so?", "What is so?", "What is it so?"]


PER_CELL = 6
TOKENIZER = tokenizer.load()


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    file = tmp_path_factory.mktemp("held-out") / "held-out.jsonl.zst"
    evaluation_set.write(file, TOKENIZER, PER_CELL)
    return read_items(file)


def test_every_cell_has_its_items(items: list[Item]) -> None:
    kinds = Counter(kind for kind, _ in evaluation_set.CELLS)
    assert Counter(item.kind for item in items) == {kind: PER_CELL * cells for kind, cells in kinds.items()}


def test_lengths_are_near_those_of_the_cells(items: list[Item]) -> None:
    singles = [item.tokens for item in items if item.kind == "single"]
    for place, tokens in enumerate(tokens for kind, tokens in evaluation_set.CELLS if kind == "single"):
        cell = singles[place * PER_CELL : (place + 1) * PER_CELL]
        assert all(0.5 * tokens < length <= tokens for length in cell)


def test_tokens_are_the_server_s(items: list[Item]) -> None:
    prompter = ChatPrompter(TOKENIZER, chat_template())
    for item in items[::5]:
        sent = conversation([dict(message) for message in item.messages], list(item.tools) or None)
        assert len(prompter.prepare(sent).prompt) == item.tokens


def test_reader_of_the_documents_gives_the_answers(items: list[Item]) -> None:
    reader = Reader("test")
    asked = [item for item in items if item.kind in ("single", "two_hop", "absent")]
    for item in asked:
        last = item.documents[-1]
        question = str(item.messages[-1]["content"])
        if last in question:
            question = question[question.index(last) + len(last) :].removeprefix(SEGMENT)
        assert item.answers == (reader.answer(question, reader.facts(item.documents)),)


def test_questions_of_a_group_stand_behind_the_same_text(items: list[Item]) -> None:
    """Each with the documents and without the questions before it."""
    several = 0
    for _, group in groupby(items, key=lambda item: item.group):
        members = [item for item in group if item.kind in ("single", "two_hop", "absent")]
        for item in members:
            assert item.documents == members[0].documents
            assert item.messages[:-1] == members[0].messages[:-1]
            assert len(item.messages) <= 2
        several += len(members) > 1
    assert several > 5


def test_calls_are_those_of_the_tools(items: list[Item]) -> None:
    for item in items:
        assert (item.call is not None) == (item.kind == "tool")
        if item.call is not None:
            assert item.call.name in [tool["function"]["name"] for tool in item.tools]
            assert json.dumps(dict(item.call.arguments)) in item.answers[0]


def test_earlier_calls_are_sent_as_text_with_an_id(items: list[Item]) -> None:
    calls = [call for item in items for m in item.messages for call in m.get("tool_calls", ())]
    assert calls
    assert all(isinstance(call["function"]["arguments"], str) and call["id"] for call in calls)


def test_the_same_seed_gives_the_same_set(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        evaluation_set.write(file, TOKENIZER, 2)
    assert files[0].read_bytes() == files[1].read_bytes()

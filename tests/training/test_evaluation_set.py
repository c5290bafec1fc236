"""The held-out set: items for `headwater eval`, whose answers follow from the sent text."""

import json
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from headwater.evaluate.items import Item, read_items
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.requests.messages import conversation
from tests.training.reader import Reader
from training import evaluation_set, tokenizer
from training.tasks.recall import SEGMENT
from training.template import chat_template

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

"""Questions about documents: a reader that knows only the text comes to the same answers."""

import random
from collections import Counter

import pytest

from tests.training.reader import Reader
from training.tasks import Example, draw
from training.tasks.example import ABSENT, NOT_IN_DOCUMENTS, RECALL, SINGLE, TWO_HOP
from training.tasks.recall import SEGMENT
from training.tasks.split import SPLITS

READERS = {split: Reader(split) for split in SPLITS}
SIZES = (256, 700, 1024, 3000)


def examples(split: str, kinds: tuple[str, ...], number: int = 12) -> list[Example]:
    rng = random.Random(f"{split} {kinds}")
    return [draw(rng, SIZES[i % len(SIZES)], split, kinds) for i in range(number)]


def questions(example: Example) -> list[str]:
    """Without the documents before the first one."""
    asked = [str(example.messages[turn - 1]["content"]) for turn in example.turns]
    last = example.documents[-1]
    if last in asked[0]:
        asked[0] = asked[0][asked[0].index(last) + len(last) :].removeprefix(SEGMENT)
    return asked


@pytest.mark.parametrize("kind", RECALL)
@pytest.mark.parametrize("split", SPLITS)
def test_answers_follow_from_the_documents_and_nothing_else_does(split: str, kind: str) -> None:
    for example in examples(split, (kind,)):
        known = READERS[split].facts(example.documents)
        for question, (asked, answers) in zip(questions(example), example.asked, strict=True):
            assert asked == kind
            assert answers == (READERS[split].answer(question, known),)


@pytest.mark.parametrize("split", SPLITS)
def test_answers_stand_in_one_document_and_bridges_in_another_place(split: str) -> None:
    for example in examples(split, (SINGLE, TWO_HOP)):
        for _, (answer,) in example.asked:
            assert any(answer.lower() in document.lower() for document in example.documents)


def test_answer_is_missing_only_where_it_is_to_be() -> None:
    for example in examples("train", RECALL, 30):
        for kind, answers in example.asked:
            assert (answers == (NOT_IN_DOCUMENTS,)) == (kind == ABSENT)


def test_kinds_of_one_context_are_mixed_and_no_question_is_asked_twice() -> None:
    mixed = 0
    for example in examples("train", RECALL, 30):
        asked = questions(example)
        assert len(set(asked)) == len(asked)
        mixed += len({kind for kind, _ in example.asked}) > 1
    assert mixed > 20


def test_documents_appear_verbatim_in_half_of_prompts_after_separators() -> None:
    separated: Counter[bool] = Counter()
    systems = 0
    for example in examples("train", RECALL, 60):
        first, second = str(example.messages[0]["content"]), str(example.messages[1]["content"])
        where = first if example.documents[0] in first else second
        marked = SEGMENT in where
        separated[marked] += 1
        systems += example.messages[0]["role"] == "system" and where is first
        between = SEGMENT if marked else ""
        assert between + between.join(example.documents) + between in where
        assert all(document.endswith(".\n\n") for document in example.documents)
    assert min(separated.values()) > 15
    assert systems > 3


def test_numbers_of_documents_and_questions() -> None:
    rng = random.Random(3)
    for tokens in (256, 512, 1024) * 10:
        example = draw(rng, tokens, "train", RECALL)
        assert 4 <= len(example.documents) <= 16
        assert 2 <= len(example.asked) <= 16
    assert max(len(draw(rng, 4096, "train", RECALL).documents) for _ in range(10)) > 30

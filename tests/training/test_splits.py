"""Nothing of the test is seen in training, save the pieces that it is made of."""

import random

import pytest

from tests.training.reader import RELATIONS, pool
from training.tasks import draw, memory, persona, smalltalk, tools
from training.tasks.chains import CHAINS
from training.tasks.documents import ASIDES, LEADS
from training.tasks.example import KINDS, RECALL
from training.tasks.split import SPLITS, belongs, expanded, words
from training.tasks.words import NUMBERS, POOLS, Drawer

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

"""Draws of a training: texts, and tasks of recall."""

import json
import random
from collections import Counter

import pytest

from headwater.evaluate.asking import misfit
from tests.training.reader import Reader
from training import tokenizer
from training.tasks import KINDS, Example, draw
from training.tasks.example import (
    ABSENT,
    MEMORY,
    NOT_IN_DOCUMENTS,
    NOT_TOLD,
    NOTED,
    PAIRS,
    PERSONA,
    RECALL,
    SINGLE,
    TEXT,
    TOOL,
    TWO_HOP,
)
from training.tasks.recall import SEGMENT
from training.tasks.split import SPLITS
from training.template import example_text, rendered


def several(kind: str, number: int, tokens: int = 512, split: str = "train") -> list[Example]:
    rng = random.Random(f"{kind} {split}")
    return [draw(rng, tokens, split, (kind,)) for _ in range(number)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_example(kind: str) -> None:
    first, again, other = (draw(random.Random(seed), 400, "train", (kind,)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != TEXT])
@pytest.mark.parametrize("split", SPLITS)
def test_examples_are_at_most_as_long_as_they_may_be(kind: str, split: str) -> None:
    rng = random.Random(1)
    for tokens in (192, 256, 512, 1024, 4096):
        for _ in range(3):
            example = draw(rng, tokens, split, (kind,))
            assert len(tokenizer.encode(example)[0]) <= tokens


def test_documents_of_any_length_can_be_drawn() -> None:
    """At 1,200 tokens documents begin to be longer: with as many of them as before, each has room for one fact."""
    for tokens in range(1180, 2400, 10):
        for seed in range(3):
            assert draw(random.Random(f"{tokens} {seed}"), tokens, "train", ("single",)).asked


@pytest.mark.parametrize("kind", ["single", "two_hop", "absent"])
def test_examples_about_documents_fill_their_tokens(kind: str) -> None:
    lengths = [len(tokenizer.encode(example)[0]) for example in several(kind, 12, 1024)]
    assert sum(lengths) / len(lengths) > 0.8 * 1024


def test_counter_is_believed() -> None:
    count = tokenizer.counter()
    for kind in KINDS:
        example = draw(random.Random(2), 700, "train", (kind,), count=count)
        assert len(tokenizer.encode(example)[0]) <= 700


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_where_the_accepted_answers_stand(kind: str) -> None:
    for example in several(kind, 10):
        assert len(example.turns) == len(example.asked) or kind == TEXT
        assert example.asked or kind in (PAIRS, TEXT)
        for turn, (_, accepted) in zip(example.turns, example.asked, strict=True):
            message = example.messages[turn]
            assert message["role"] == "assistant"
            assert example.messages[turn - 1]["role"] == "user"
            before = rendered(example.messages[:turn], example.tools, generate=True)
            shown = rendered(example.messages[: turn + 1], example.tools).removeprefix(before)
            assert shown.removesuffix("<|im_end|>\n").removeprefix(" ") in accepted


def test_kinds_come_as_often_as_their_weights_say() -> None:
    rng = random.Random(0)
    kinds = [draw(rng, 192, "train", {"tool": 3.0, "memory": 1.0}).kind for _ in range(80)]
    assert set(kinds) == {"tool", "memory"}
    assert kinds.count("tool") > kinds.count("memory")


def test_impossible_draws_are_refused_with_the_reason() -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match="riddle"):
        draw(rng, 256, "train", ("riddle",))
    with pytest.raises(ValueError, match="'validation'"):
        draw(rng, 256, "validation")
    with pytest.raises(ValueError, match=r"64 tokens, it needs 192"):
        draw(rng, 64, "train")


def test_memory_task_asks_for_mentioned_and_unmentioned_facts() -> None:
    untold = told = 0
    for example in several(MEMORY, 30):
        for turn, (_, (answer,)) in zip(example.turns, example.asked, strict=True):
            said = [str(m["content"]) for m in example.messages[: turn - 1] if m["role"] == "user"]
            untold += answer == NOT_TOLD
            told += answer != NOT_TOLD
            assert answer == NOT_TOLD or any(answer.lower() in text.lower() for text in said)
        assert any(m["content"] == NOTED for m in example.messages)
    assert 5 < untold < told


def test_persona_keeps_to_its_name() -> None:
    introduced = 0
    for example in several(PERSONA, 30):
        system = str(example.messages[0]["content"])
        for _, (answer,) in example.asked:
            if "I am " in answer:
                introduced += 1
                name = answer.split("I am ")[1].split()[0].rstrip(".,")
                assert name in system.split(". ")[0]
    assert introduced > 20


def test_persona_keeps_to_the_word_that_its_answers_end_with() -> None:
    ended = 0
    for example in several(PERSONA, 60, split="test"):
        style = str(example.messages[0]["content"]).partition("\n\n")[0].split(". ")[1]
        if style.startswith(("End", "Close", "Finish")) or " ends " in style or " closes " in style:
            word = style.rstrip(".").split()[-1]
            ended += 1
            answers = [m["content"] for m in example.messages if m["role"] == "assistant"]
            assert all(answer.endswith(f", {word}.") for answer in answers)
    assert ended > 5


@pytest.mark.parametrize("split", SPLITS)
def test_calls_fit_their_tool_and_have_the_request_s_values(split: str) -> None:
    without = 0
    for example in several(TOOL, 20, split=split):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools or ()}
        assert 1 <= len(schemas) <= 3
        for turn, (_, (answer,)) in zip(example.turns, example.asked, strict=True):
            request = str(example.messages[turn - 1]["content"])
            written = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert misfit(written["arguments"], schemas[written["name"]], "arguments") is None
            assert all(f"{name} {value}" in request for name, value in written["arguments"].items())
        users = sum(message["role"] == "user" for message in example.messages)
        without += users - len(example.asked)
    assert without > 5  # turns that need no tool


def test_text_has_no_markup() -> None:
    (example,) = several(TEXT, 1)
    assert "<|" not in example_text(example)
    assert example.asked == ()


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

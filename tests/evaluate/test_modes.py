"""Documents marked as segments, and requests that are composed of them."""

from __future__ import annotations

import pytest

from headwater.evaluate.items import DEFAULT_TASKS, read_items
from headwater.evaluate.modes import COMPOSED, MODES, SEGMENTS, SEPARATOR, Asking, marked, places
from headwater.request import Fidelity
from tests.evaluate.items import item

TWO = ["D1\n\n", "D2\n\n"]
ORDERS = {f"{SEPARATOR}{a}\n\n{SEPARATOR}{b}\n\n{SEPARATOR}" for a, b in (("D1", "D2"), ("D2", "D1"))}


def test_each_document_is_marked_and_so_is_the_end_of_the_last() -> None:
    one = item(messages=[{"role": "user", "content": "Documents:\n\nD1\n\nD2\n\nWho?"}], documents=TWO)
    ((message,), *others) = (marked(one, number) for number in range(20))
    assert message["content"].removeprefix("Documents:\n\n").removesuffix("Who?") in ORDERS
    assert {made["content"] for (made,) in others} == {f"Documents:\n\n{order}Who?" for order in ORDERS}


def test_documents_may_be_named_in_another_order_than_they_stand_in() -> None:
    one = item(messages=[{"role": "user", "content": "Documents:\n\nD1\n\nD2\n\nWho?"}], documents=TWO[::-1])
    (message,) = marked(one, 0)
    assert message["content"].removeprefix("Documents:\n\n").removesuffix("Who?") in ORDERS


def test_marks_that_are_there_already_are_not_doubled() -> None:
    content = f"Read.\n\n{SEPARATOR}D1\n\n{SEPARATOR}D2\n\n{SEPARATOR}"
    asked = {"role": "user", "content": "Who?"}
    one = item(messages=[{"role": "system", "content": content}, asked], documents=TWO)
    system, question = marked(one, 3)
    assert system["content"].removeprefix("Read.\n\n") in ORDERS
    assert question == asked


def test_in_the_held_out_set_all_documents_are_found() -> None:
    with_documents = [one for one in read_items(DEFAULT_TASKS) if one.documents][:300]
    moved = 0
    for number, one in enumerate(with_documents):
        text = "".join(str(message["content"]) for message in marked(one, number))
        assert text.count(SEPARATOR) == len(one.documents) + 1
        parts = [part.strip() for part in text.split(SEPARATOR)[1:-1]]
        documents = [document.strip() for document in one.documents]
        assert sorted(parts) == sorted(documents)
        moved += parts != documents
    assert moved > 250


def test_all_ways_of_segments_ask_the_same_prompt() -> None:
    asking = Asking(item(), 3, 0, "run")
    fields = {mode: MODES[mode].fields(asking) for mode in SEGMENTS}
    assert len({str(one["messages"]) for one in fields.values()}) == 1
    assert fields["whole"]["exact"] is fields["prefixes"]["exact"] is True
    assert [fields[mode].get("fidelity") for mode in SEGMENTS] == [None, None, *COMPOSED]
    assert set(COMPOSED) == set(Fidelity)
    assert len({one["cache_salt"] for one in fields.values()}) == len(SEGMENTS)


@pytest.mark.parametrize(
    ("content", "documents", "stand"),
    [
        ("abc abcdef", ["abc", "abcdef"], [(0, 3), (4, 10)]),
        ("abcdef abc", ["abc", "abcdef"], [(0, 6), (7, 10)]),
        ("x abcdef", ["abc", "abcdef"], [(2, 8)]),  # the shorter one occurs only in the longer one
        ("abc abc", ["abc", "abc"], [(0, 3), (4, 7)]),
        ("abc", ["abc", "abc", "", "z"], [(0, 3)]),
    ],
)
def test_a_document_stands_where_no_other_one_does(content: str, documents: list[str], stand: list[tuple]) -> None:
    assert [(place.start, place.stop) for place in places(content, documents)] == stand


@pytest.mark.parametrize("documents", [["D1", "D1 and more"], ["D1 and more", "D1"], ["D1", "D1"], ["Read.", "D1"]])
def test_marking_loses_and_doubles_nothing(documents: list[str]) -> None:
    content = "Read.\n\nD1 and more\n\nD1\n\nD2\n\nWho?"
    for number in range(5):
        (message,) = marked(item(messages=[{"role": "user", "content": content}], documents=documents), number)
        assert sorted(message["content"].replace(SEPARATOR, "").split()) == sorted(content.split())
        assert message["content"].count(SEPARATOR) == 1 + len(places(content, documents))


def test_content_that_holds_no_document_is_as_it_was() -> None:
    content = f"Nothing{SEPARATOR}of them."
    (message,) = marked(item(messages=[{"role": "user", "content": content}], documents=TWO), 0)
    assert message["content"] == content

"""Documents marked as segments, and requests that are composed of them."""

from __future__ import annotations

from headwater.quality.item import DEFAULT_TASKS, read_items
from headwater.quality.ways import SEGMENTS, SEPARATOR, WAYS, Asking, marked
from tests.quality.items import item


def test_each_document_is_marked_and_so_is_the_end_of_the_last() -> None:
    found = marked(
        item(messages=[{"role": "user", "content": "Documents:\n\nD1\n\nD2\n\nWho?"}], documents=["D1\n\n", "D2\n\n"])
    )
    assert found == [{"role": "user", "content": f"Documents:\n\n{SEPARATOR}D1\n\n{SEPARATOR}D2\n\n{SEPARATOR}Who?"}]


def test_marks_that_are_there_already_stay_as_they_are() -> None:
    content = f"Read.\n\n{SEPARATOR}D1\n\n{SEPARATOR}D2\n\n{SEPARATOR}"
    asked = {"role": "user", "content": "Who?"}
    one = item(messages=[{"role": "system", "content": content}, asked], documents=["D1\n\n", "D2\n\n"])
    assert marked(one) == [{"role": "system", "content": content}, asked]


def test_in_the_held_out_set_all_documents_are_found() -> None:
    with_documents = [one for one in read_items(DEFAULT_TASKS) if one.documents][:300]
    for one in with_documents:
        text = "".join(str(message["content"]) for message in marked(one))
        assert text.count(SEPARATOR) == len(one.documents) + 1
        parts = text.split(SEPARATOR)[1:-1]
        assert [part.strip() for part in parts] == [document.strip() for document in one.documents]


def test_all_ways_of_segments_ask_the_same_prompt() -> None:
    asking = Asking(item(), 3, 0, "run")
    fields = {way: WAYS[way].fields(asking) for way in SEGMENTS}
    assert len({str(one["messages"]) for one in fields.values()}) == 1
    assert fields["whole"]["exact"] is True
    assert [fields[way].get("fidelity") for way in SEGMENTS] == [None, "fast", "balanced", "high"]
    assert len({one["cache_salt"] for one in fields.values()}) == len(SEGMENTS)

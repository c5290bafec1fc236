"""Scores of answers, and the modes in which items are asked."""

import sys

import pytest

from headwater.errors import ConfigError
from headwater.evaluate.asking import exact_match, malformed, misfit, normalised, score, token_f1
from headwater.evaluate.items import DEFAULT_TASKS, read_items
from headwater.evaluate.modes import COMPOSED, MODES, SEGMENTS, SEPARATOR, Asking, marked, places
from headwater.request import Fidelity
from tests.evaluate.items import LOOK_UP, answered, item, tool_item


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Blue box.", "blue box"),
        ("A code: KX-4471!", "code kx4471"),
        ("theatre and an anthem", "theatre and anthem"),  # articles are words, not parts of them
        ("the", ""),
        ("Zürich\n", "zürich"),
    ],
)
def test_articles_case_punctuation_and_spaces_do_not_count(text, plain):
    assert normalised(text) == plain


def test_exact_match_is_of_the_whole_answer():
    assert exact_match("The red box.", "red box") == 1
    assert exact_match("It is the red box.", "red box") == 0


@pytest.mark.parametrize(
    ("answer", "right", "f1"),
    [
        ("red box", "the red box", 1.0),
        ("red", "red box", 2 / 3),  # precision 1, recall 1/2
        ("a very red box", "red box", 0.8),  # precision 2/3, recall 1
        ("red red red", "red box red", 2 / 3),  # a word counts as often as both have it
        ("green ship", "red box", 0.0),
        ("", "red", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(answer, right, f1):
    assert token_f1(answer, right) == pytest.approx(f1)


def test_the_best_of_several_right_answers_counts():
    found = score(item(answers=["room 12", "12"]), answered("12."))
    assert (found.exact, found.f1, found.well_formed) == (1.0, 1.0, None)


@pytest.mark.parametrize("asked", [item(), tool_item()])
def test_refused_item_is_wrong_even_if_empty_is_right(asked):
    found = score(asked, answered(outcome="refused", text="Ada"))
    assert found.exact == 0
    assert found.f1 in (0, None)
    assert found.well_formed in (0, None)


@pytest.mark.parametrize(
    ("calls", "exact", "well_formed"),
    [
        ([("look_up", '{"code": "K1"}')], 1, 1),
        ([("look_up", '{"code":  "K1" }')], 1, 1),
        ([("look_up", '{"code": "K2"}')], 0, 1),
        ([("look_up", '{"code": "K1", "count": 2}')], 0, 1),
        ([("look_up", '{"code": "K1", "count": "2"}')], 0, 0),
        ([("look_up", '{"count": 2}')], 0, 0),
        ([("look_up", '{"code": "K1"')], 0, 0),
        ([("look_up", "[]")], 0, 0),
        ([("look_up", "")], 0, 0),
        ([("look_down", '{"code": "K1"}')], 0, 0),
        ([], 0, 0),
        ([("look_up", '{"code": "K1"}'), ("look_up", "{")], 1, 1),  # the first call counts
    ],
)
def test_call_is_well_formed_by_schema_and_exact_by_equality(calls, exact, well_formed):
    found = score(tool_item(), answered("", *calls))
    assert (found.exact, found.f1, found.well_formed) == (exact, None, well_formed)


def test_malformed_call_is_reported():
    assert "'look_down'" in malformed({"name": "look_down", "arguments": "{}"}, [LOOK_UP])
    assert "not JSON" in malformed({"name": "look_up", "arguments": "code"}, [LOOK_UP])
    assert "not JSON" in malformed({"name": "look_up", "arguments": "[" * 100_000}, [LOOK_UP])
    assert "arguments: 'code' is a required property" in malformed({"name": "look_up", "arguments": "{}"}, [LOOK_UP])


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        (1, {"type": "integer"}, True),
        (1.0, {"type": "integer"}, True),  # JSON has one kind of number
        (1.5, {"type": "integer"}, False),
        (float("inf"), {"type": "integer"}, False),  # 1e999 is JSON
        (True, {"type": "integer"}, False),
        (1.5, {"type": "number"}, True),
        (None, {"type": ["string", "null"]}, True),
        (3, {"type": ["string", "null"]}, False),
        ("b", {"enum": ["a"]}, False),
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}, False),
        ([1, 2], {"type": "array", "items": {"type": "integer"}}, True),
        ({"a": {"b": 1}}, {"properties": {"a": {"type": "object", "required": ["c"]}}}, False),
        ({"a": 1}, {"type": "object", "additionalProperties": False}, False),
        ({"a": 1}, {"type": "object"}, True),
        ("anything", {}, True),
        ("anything", True, True),
        ({"a": 1}, {"properties": {"a": True}}, True),
        ({"a": 1}, {"properties": {"a": False}}, False),
        ([1], {"items": False}, False),
    ],
)
def test_values_fit_schemas(value, schema, fits):
    assert (misfit(value, schema, "value") is None) is fits


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},  # no type of JSON schema
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "#/$defs/none"},
    ],
)
def test_inapplicable_schema_fits_no_value_and_is_not_fetched(schema):
    assert "unknown type or reference" in misfit("x", {"properties": {}, **schema}, "value")


def test_without_jsonschema_tool_calls_are_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert score(item(), answered("Ada")).exact == 1
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[eval\]'"):
        score(tool_item(), answered("", ("look_up", '{"code": "K1"}')))


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

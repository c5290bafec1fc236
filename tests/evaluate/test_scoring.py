"""Scores of answers, worked out by hand."""

from __future__ import annotations

import sys

import pytest

from headwater.errors import ConfigError
from headwater.evaluate.asking import exact_match, malformed, misfit, normalised, score, token_f1
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

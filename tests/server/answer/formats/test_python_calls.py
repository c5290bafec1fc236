"""Calls of functions with keyword arguments: values become JSON, strings as they come."""

from __future__ import annotations

import json

import pytest

from headwater.server.answer.formats import TOOLS, tool_format
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content
from tests.server.answer.formats.cases import WEATHER_TOOLS, parse, shape
from tests.server.answer.formats.printed import REAL

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
CALLED = ("weather", {"city": "Bonn"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f'{OPEN}[weather(city="Bonn")]{CLOSE}', [CALLED]),
        (f"{OPEN}[weather(city='Bonn'), ping()]{CLOSE}", [CALLED, ("ping", {})]),
        (f"{OPEN}\n[ weather ( city = 'Bonn' , ) , ping( ) ]\n{CLOSE}and", [CALLED, ("ping", {}), "c:and"]),
        (f"{OPEN}weather(city='Bonn'){CLOSE}", [CALLED]),
        (f"{OPEN}[weather(city='Bonn')", [CALLED]),
        (f"so {OPEN}[weather(city='Bonn')]{CLOSE}{OPEN}[ping()]{CLOSE}", ["c:so", CALLED, ("ping", {})]),
        (f'{OPEN}[{{"name": "weather", "arguments": {{"city": "Bonn"}}}}]{CLOSE}', [CALLED]),
        (f"{OPEN}[]{CLOSE}", [f"c:{OPEN}[]{CLOSE}"]),
        (f"{OPEN}[a b]{CLOSE}", [f"c:{OPEN}[a b]{CLOSE}"]),
        (f"{OPEN}[weather", [f"c:{OPEN}[weather"]),
    ],
)
def test_calls_are_parsed_and_malformed_ones_stay_content(text, parts):
    assert shape(parse([text], "python")) == parts
    assert shape(parse(text, "python")) == parts


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3),
        ("-1.50", -1.5),
        ("True", True),
        ("false", False),
        ("None", None),
        ("['a', \"b\", 'c, )']", ["a", "b", "c, )"]),
        ("{'a': (1, None), 'b': [True]}", {"a": [1, None], "b": [True]}),
        ('{"a": [null]}', {"a": [None]}),
        ("Bonn", "Bonn"),
        ("{1, 2}", "{1, 2}"),
        (r"'a\n\'\"\\\u00e9\x41\U0001F642\q'", "a\n'\"\\éA🙂\\q"),
        (r"'\ud83d\ude42'", "🙂"),
        ("'L'Aquila'", "L'Aquila"),
        ("'say \"x\", it's (so)'", 'say "x", it\'s (so)'),
        ("''", ""),
    ],
)
def test_values_of_python_become_json(written, value):
    text = f"{OPEN}[weather(city={written}, days=2), ping()]{CLOSE}"
    wanted = [("weather", {"city": value, "days": 2}), ("ping", {})]
    assert shape(parse([text], "python")) == wanted
    assert shape(parse(text, "python")) == wanted
    assert shape(parse([text.replace(", days=2", "")], "python")) == [("weather", {"city": value}), ("ping", {})]


def test_argument_without_name_leaves_the_call_incomplete():
    (begun, arguments, *rest) = parse([f"{OPEN}[weather('Bonn')]{CLOSE}"], "python")
    assert (begun, arguments) == (CallBegin("weather"), CallArguments("{"))
    assert rest == [Content(f"'Bonn')]{CLOSE}")]


def test_strings_stream_as_they_arrive():
    parser = AnswerParser(None, False, TOOLS["python"], WEATHER_TOOLS)

    def push(text):
        return [delta for delta in parser.push(text) if delta not in (Content(""), CallArguments(""))]

    assert push(f"{OPEN}[weather(ci") == [CallBegin("weather"), CallArguments("{")]
    assert push("ty='Bo") == [CallArguments('"city": "'), CallArguments("Bo")]
    assert push("nn\\") == [CallArguments("nn")]
    assert push("n'") == [CallArguments("\\n")]
    assert push(f")]{CLOSE}") == [CallArguments('"'), CallArguments("}")]


def test_templates_that_print_no_calls_are_recognised_by_their_lists_of_tools():
    assert tool_format("auto", '{{ "List of tools: <|tool_list_start|>[" }}') is TOOLS["python"]
    real = REAL / "lfm2.5-8b-a1b.chat_template.jinja"
    if real.exists():
        assert tool_format("auto", real.read_text()) is TOOLS["python"]


def test_arguments_are_valid_json_if_a_value_has_half_a_surrogate_pair():
    (_, arguments) = parse([rf"{OPEN}[weather(city='\ud83d', tags=['\ud83d'])]{CLOSE}"], "python")
    assert json.loads(arguments.text) == {"city": "\ud83d", "tags": ["\ud83d"]}
    arguments.text.encode()

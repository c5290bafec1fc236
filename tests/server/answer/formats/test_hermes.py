"""JSON calls between tags: well-formed calls, calls with a model's mistakes, and texts that are not calls."""

import pytest

from headwater.server.answer.formats import TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content
from tests.server.answer.formats.cases import WEATHER_TOOLS, parse, shape

BONN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
CALLED = ("weather", {"city": "Bonn"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BONN, [CALLED]),
        (f"I look.\n\n{BONN}\n{PING}", ["c:I look.", CALLED, ("ping", {})]),
        (f"{BONN}\nand\n{PING}\nDone.", [CALLED, "c:and", ("ping", {}), "c:Done."]),
        ('<tool_call>{"arguments": {"city": "Bonn"}, "name": "weather"}</tool_call>', [CALLED]),
        ('<tool_call>{"name":"weather","parameters":{"city":"Bonn"}}</tool_call>', [CALLED]),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}</tool_call>', [CALLED]),
        ('<tool_call>{"name": "ping"}</tool_call>', [("ping", {})]),
        ('<tool_call>{"name": "ping", "arguments": null}', [("ping", {})]),
        (BONN.removesuffix("</tool_call>"), [CALLED]),
        (BONN.replace("}}", "}}}"), [CALLED]),
        (BONN.replace("}}", "}"), [CALLED]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>}"}}</tool_call>',
         [("weather", {"city": "</tool_call>}"})]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "a\\\\\\"{"}}</tool_call>',
         [("weather", {"city": 'a\\"{'})]),
        ("<tool_call>\nnonsense\n</tool_call>", ["c:<tool_call>\nnonsense\n</tool_call>"]),
        (f"a <tool_call> b {BONN}", ["c:a <tool_call> b", CALLED]),
        ("<tool_call>", ["c:<tool_call>"]),
        ('x\n<tool_call>{"name": 3}</tool_call> y', ['c:x\n<tool_call>{"name": 3}</tool_call> y']),
        (f'<tool_call>{{"nom": "weather"}}\n{BONN}', ['c:<tool_call>{"nom": "weather"}', CALLED]),
        ('<tool_call>{"name": "ping", "arguments": [1]}</tool_call>',
         ['c:<tool_call>{"name": "ping", "arguments": [1]}</tool_call>']),
        ('<tool_call>{"name": "ping", "arguments": NaN}</tool_call>',
         ['c:<tool_call>{"name": "ping", "arguments": NaN}</tool_call>']),
    ],
)  # fmt: skip
def test_calls_are_parsed_and_malformed_ones_stay_content(text, parts):
    assert shape(parse([text], "hermes")) == parts
    assert shape(parse(text, "hermes")) == parts


def test_arguments_are_passed_on_as_they_are_written_and_as_they_come():
    parser = AnswerParser(None, False, TOOLS["hermes"], WEATHER_TOOLS)
    assert parser.push('<tool_call>\n{"name": "weather", "argu') == [Content("")]
    assert parser.push('ments": {"ci') == [CallBegin("weather"), CallArguments('{"ci')]
    assert parser.push('ty":   "Bo') == [CallArguments('ty":   "Bo')]
    assert parser.push('nn"}}\n</tool') == [CallArguments('nn"}')]
    assert [delta for delta in parser.push("_call>") if delta != Content("")] == []


@pytest.mark.parametrize("end", ['{"city": "Bo', '{"city": "Bonn"', "{"])
def test_truncated_call_keeps_its_partial_arguments(end):
    text = f'<tool_call>\n{{"name": "weather", "arguments": {end}'
    assert parse([text], "hermes") == [CallBegin("weather"), CallArguments(end)]


def test_arguments_missing_a_brace_stay_and_next_call_is_found():
    broken = '<tool_call>\n{"name": "weather", "arguments": {"a": {"b": 1}\n</tool_call>\n'
    deltas = parse([broken + PING], "hermes")
    assert deltas == [CallBegin("weather"), CallArguments('{"a": {"b": 1}\n'), CallBegin("ping"), CallArguments("{}")]

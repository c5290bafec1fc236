"""Lists of calls with and without brackets and commas, and texts that are not calls."""

import pytest

from headwater.server.answer.formats import TOOLS
from headwater.server.answer.formats.json_calls import JsonCalls
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content
from tests.server.answer.formats.cases import WEATHER_TOOLS, json_call, parse, shape

BONN, PING = json_call("weather", {"city": "Bonn"}), json_call("ping", {})
CALLED, PINGED = ("weather", {"city": "Bonn"}), ("ping", {})
LISTS = [name for name, tools in TOOLS.items() if isinstance(tools, JsonCalls) and tools.close]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    ("inside", "parts"),
    [
        (f"[{BONN}, {PING}]", [CALLED, PINGED]),
        (f" [ {BONN}\n{PING} ] ", [CALLED, PINGED]),
        (f"\n{BONN}\n{PING}\n", [CALLED, PINGED]),
        (f"{BONN},{PING}", [CALLED, PINGED]),
        ('[{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}, {"name": "ping"}]', [CALLED, PINGED]),
        (f'[{{"arguments": {{"city": "Bonn"}}, "name": "weather"}}, {PING}]', [CALLED, PINGED]),
        (f"[{BONN[:-1]}, {PING}]", [CALLED, PINGED]),
        (f"[{BONN}}}, {PING}]", [CALLED, PINGED]),
    ],
)
def test_calls_between_tags_are_read(name, inside, parts):
    text = TOOLS[name].open + inside + TOOLS[name].close
    assert shape(parse([text + "\nso"], name)) == [*parts, "c:so"]
    assert shape(parse(text + "\nso", name)) == [*parts, "c:so"]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    ("inside", "parts"),
    [
        (f"[{BONN}, nonsense]", [CALLED, "c:nonsense]"]),
        (f"[{BONN}, {{\"nom\": 1}}, {PING}]", [CALLED, f'c:{{"nom": 1}}, {PING}]']),
        (f"[{BONN}] more", [CALLED, "c:more"]),
    ],
)  # fmt: skip
def test_malformed_list_item_after_a_call_becomes_content(name, inside, parts):
    *calls, content = parts
    text = TOOLS[name].open + inside + TOOLS[name].close
    assert shape(parse([text], name)) == [*calls, content + TOOLS[name].close]
    assert shape(parse(text, name)) == [*calls, content + TOOLS[name].close]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<|tool_call|>[{BONN}]", [CALLED]),
        (f"<|tool_call|> [{BONN}, {PING}]\n\nSo.", [CALLED, PINGED, "c:So."]),
        (f"<|tool_call|>{BONN}", [CALLED]),
        (f"<|tool_call|>[{BONN}]<|tool_call|>[{PING}]", [CALLED, PINGED]),
    ],
)
def test_list_that_nothing_closes_ends_with_its_bracket(text, parts):
    assert shape(parse([text], "granite")) == parts
    assert shape(parse(text, "granite")) == parts


def test_arguments_of_each_call_are_passed_on_as_they_come():
    parser = AnswerParser(None, False, TOOLS["nemotron"], WEATHER_TOOLS)

    def push(text):
        return [delta for delta in parser.push(text) if delta not in (Content(""), CallArguments(""))]

    assert push('<TOOLCALL>[{"name": "weather", "arguments": {"ci') == [CallBegin("weather"), CallArguments('{"ci')]
    assert push('ty": "Bonn"}}, {"na') == [CallArguments('ty": "Bonn"}')]
    assert push('me": "ping", "arguments": {}') == [CallBegin("ping"), CallArguments("{}")]
    assert push("}]</TOOL") == []
    assert push("CALL>So.") == [Content("So.")]

"""Sections of calls with ids: the name comes from the id, and the id is passed on."""

from __future__ import annotations

import pytest

from headwater.server.answer.formats import TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content
from tests.server.answer.formats.cases import WEATHER_TOOLS, parse, shape

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(id_="functions.weather:0", arguments='{"city": "Bonn"}'):
    return f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


CALLED = ("weather", {"city": "Bonn"})
PING = call("functions.ping:7", "{}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (OPEN + call() + CLOSE, [CALLED]),
        (f"{OPEN}\n{call()}\n{PING}\n{CLOSE}", [CALLED, ("ping", {})]),
        (OPEN + call() + CLOSE + "and" + OPEN + PING + CLOSE, [CALLED, "c:and", ("ping", {})]),
        (OPEN + call("weather") + CLOSE, [CALLED]),
        (OPEN + call("weather:3"), [CALLED]),
        (OPEN + call(" functions.weather:0 ", '\n{"city": "Bonn"}}\n') + PING, [CALLED, ("ping", {})]),
        (OPEN + call(arguments='{"city": "<|tool_call_end|>"}') + CLOSE, [("weather", {"city": "<|tool_call_end|>"})]),
        (OPEN + call().replace("<|tool_call_end|>", "") + PING, [CALLED, ("ping", {})]),
        (OPEN + call() + "nonsense" + CLOSE, [CALLED, "c:nonsense" + CLOSE]),
        (OPEN + call() + "<|tool_call_begin|>a b" + CLOSE, [CALLED, "c:<|tool_call_begin|>a b" + CLOSE]),
        (OPEN + call(""), [f"c:{OPEN}{call('')}"]),
        (OPEN + call(arguments="[]"), [f"c:{OPEN}{call(arguments='[]')}"]),
        (OPEN + CLOSE, [f"c:{OPEN}{CLOSE}"]),
        (f"so {call()}{PING}", ["c:so", CALLED, ("ping", {})]),
        (call("nowhere:0"), [f"c:{call('nowhere:0')}"]),
    ],
)
def test_calls_are_parsed_and_malformed_ones_stay_content(text, parts):
    assert shape(parse([text], "kimi")) == parts
    assert shape(parse(text, "kimi")) == parts


def test_ids_and_arguments_stream_unchanged_as_they_arrive():
    parser = AnswerParser(None, False, TOOLS["kimi"], WEATHER_TOOLS)

    def push(text):
        return [delta for delta in parser.push(text) if delta not in (Content(""), CallArguments(""))]

    assert push(f"{OPEN}<|tool_call_begin|>functions.weather:12<|tool_call_arg") == []
    assert push('ument_begin|>{"ci') == [CallBegin("weather", "functions.weather:12"), CallArguments('{"ci')]
    assert push('ty":  "Bonn"}<|tool') == [CallArguments('ty":  "Bonn"}')]
    assert push(f"_call_end|>{CLOSE}") == []

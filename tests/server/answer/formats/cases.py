"""Parsing of a text in given pieces, and calls written in each format."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import strategies as st

from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content, Reasoning, joined
from headwater.server.requests.tools import FunctionDefinition

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
}
WEATHER_TOOLS = {
    "weather": FunctionDefinition(name="weather", parameters=WEATHER),
    "ping": FunctionDefinition(name="ping"),
}


def parse(pieces, tool_format=None, thinking=False, reasoning="think", tools=WEATHER_TOOLS):
    """Return the joined deltas of an answer that comes in these pieces."""
    parser = AnswerParser(
        REASONING[reasoning] if reasoning else None, thinking, TOOLS[tool_format] if tool_format else None, tools
    )
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined(deltas + parser.finish())


def cut(text, places):
    """Cut the text at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def json_call(name, arguments):
    return (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    )


def bare(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _xml(name, arguments):
    lines = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def _kimi(calls):
    parts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def _invoked(calls):
    parts = []
    for name, arguments in calls:
        lines = "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items())
        parts.append(f'<invoke name="{name}">\n{lines}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(parts)}</minimax:tool_call>"


def _listed(before, between, after):
    return lambda calls: before + between.join(json_call(*call) for call in calls) + after


def _pythonic(calls):
    def value(of):
        return str(of) if isinstance(of, bool) else json.dumps(of, ensure_ascii=False)

    return ", ".join(f"{name}({', '.join(f'{key}={value(of)}' for key, of in given.items())})" for name, given in calls)


# calls as (name, arguments), as models of each format write them
WRITTEN = {
    "qwen_xml": lambda calls: "\n".join(_xml(*call) for call in calls),
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{json_call(*call)}\n</tool_call>" for call in calls),
    "nemotron": _listed("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "kimi": _kimi,
    "jamba": _listed("<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"),
    "minimax": _listed("<tool_calls>\n", "\n", "\n</tool_calls>"),
    "minimax_xml": _invoked,
    "granite": _listed("<|tool_call|>[", ", ", "]"),
    "python": lambda calls: f"<|tool_call_start|>[{_pythonic(calls)}]<|tool_call_end|>",
}
assert set(WRITTEN) == set(TOOLS)

cuts = st.lists(st.integers(0, 10_000), max_size=8)


def shape(deltas):
    """Return calls as (name, decoded arguments), and other deltas as text with the first letter of their type."""
    out = []
    for delta in deltas:
        match delta:
            case CallBegin(name):
                out.append([name, ""])
            case CallArguments(text):
                out[-1][1] += text
            case Content(text):
                out.append(f"c:{text}")
            case Reasoning(text):
                out.append(f"r:{text}")
    return [(part[0], json.loads(part[1])) if isinstance(part, list) else part for part in out]

"""Grammar, parser and template agree: what a grammar can write is read back whole and printed again as it was."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config import ServeConfig
from headwater.request import SamplingParams
from headwater.server.answer.dialect import Dialect, Start
from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Reasoning, joined
from headwater.server.answer.formats.xml_calls import unreadable
from headwater.server.requests.tools import FunctionDefinition, ToolUse
from tests.server import templates
from tests.server.answer.formats.cases import WRITTEN, cut, cuts
from tests.server.answer.formats.printed import REAL, REAL_TEMPLATES, printed, printed_by_real
from tests.server.answer.formats.test_grammar import taken
from tests.server.answer.formats.test_parser import MARKUP
from tests.server.fake_engine import byte_tokenizer

PART = {
    "type": "object",
    "properties": {"ä": {"type": "string"}, "list": {"type": "array", "items": {"type": "string"}}},
    "required": ["ä", "list"],
    "additionalProperties": False,
}
CHOICES = ['return "</parameter>"', "<a>\n</parameter>\n</a>", "</tool_call>", "🙂 </function>", "", "\n"]
WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "kind": {"enum": CHOICES},
        "part": {"$ref": "#/$defs/Part"},
        "content": {"type": "string"},
        "lines": {"type": "integer"},
    },
    "required": ["path", "part"],
    "additionalProperties": False,
    "$defs": {"Part": PART},
}
KNOWN = {
    "write": FunctionDefinition(name="write", parameters=WRITE),
    "note": FunctionDefinition(
        name="note", parameters={"type": "object", "properties": {"content": {"type": "string"}}}
    ),
    "ping": FunctionDefinition(name="ping", parameters={"type": "object", "additionalProperties": False}),
}
TAGS = (
    *MARKUP, "</parameter>\n", "\n</parameter>", "\n</parameter>\n</function>\n", "\n</function>\n</tool_call>",
    "\n<parameter=content>\n", "\n<parameter=other>\n", "</parameter>\n<parameter=", "</parameter></function>",
    '</parameter>\n</invoke>', '\n<parameter name="content">', "</invoke>\n</minimax:tool_call>", "<function=write>\n",
    "\r\n", "\t", "\\n", "\u2028", "é",
)  # fmt: skip
OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"
# without DEL, which the grammar of JSON texts writes as an escape
texts = st.lists(st.sampled_from(TAGS), max_size=6).map("".join) | st.text(
    st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=8
)
parts = st.tuples(texts, st.lists(texts, max_size=2)).map(lambda two: dict(zip(("ä", "list"), two, strict=True)))
written = st.fixed_dictionaries(
    {"path": texts},
    optional={"kind": st.sampled_from(CHOICES), "content": texts, "lines": st.integers(-9, 99)},
)
calls = st.one_of(
    st.tuples(st.just("write"), st.tuples(written, parts).map(lambda two: two[0] | {"part": two[1]})),
    st.tuples(st.just("note"), st.fixed_dictionaries({}, optional={"content": texts})),
    st.tuples(st.just("ping"), st.just({})),
)
names = st.sampled_from(list(TOOLS))


def in_order(call):
    """Return a call with its arguments in the order of the schema, in which grammars write them."""
    name, arguments = call
    return name, {key: arguments[key] for key in KNOWN[name].parameters.get("properties", {}) if key in arguments}


@cache
def source(name, prompt_end):
    dialect = Dialect(templates.REASONING, ServeConfig(tool_format=name), byte_tokenizer())
    held, missing = dialect.enforced(ToolUse("required", KNOWN), "")
    assert missing == []
    return dialect.shaped(SamplingParams(), Start(prompt_end), held, None).constraint.source


def read(name, pieces, thinking):
    """Return the reasoning and the calls, each with an id if it has one; fail if there is anything else."""
    parser = AnswerParser(REASONING["think"], thinking, TOOLS[name], KNOWN, forced=True)
    reasoning, found = "", []
    for delta in joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish()):
        match delta:
            case Reasoning(text):
                reasoning += text
            case CallBegin(called, id_):
                found.append({"id": id_, "type": "function", "function": {"name": called, "arguments": ""}})
            case CallArguments(text):
                found[-1]["function"]["arguments"] += text
            case _:
                raise AssertionError(f"{delta} in an answer of calls: {''.join(pieces)!r}")
    for call in found:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return reasoning, {"role": "assistant", "content": "", "tool_calls": found}


def check(name, made, thought=None, places=()):
    """Fail unless these calls are read back whole, in any pieces, and printed again, or the grammar excludes them.

    It excludes values of tags that would end within themselves, and nothing else.
    """
    answer = WRITTEN[name](made)
    text = answer if thought is None else f"{thought}</think>\n\n{answer}"
    thinking = thought is not None
    if taken(source(name, OPEN if thinking else CLOSED), text) != (text, True):
        assert "xml" in name, text
        values = [value for _, arguments in made for value in arguments.values() if isinstance(value, str)]
        assert any(re.search(unreadable(TOOLS[name], re.escape), value) for value in values)
        return
    reasoning, message = read(name, [text], thinking)
    assert read(name, cut(text, places), thinking) == (reasoning, message)
    assert read(name, text, thinking) == (reasoning, message)
    assert reasoning == (thought or "").strip("\n")
    assert printed(name, message) == answer
    if name in REAL_TEMPLATES and REAL.exists():
        assert printed_by_real(name, message).endswith(answer)


lists = st.lists(calls.map(in_order), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(name=names, made=lists, places=cuts)
def test_calls_that_a_grammar_writes_are_read_back_and_printed_again(name, made, places):
    check(name, made, places=places)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(name=names, made=lists, places=cuts)
def test_many_calls_that_a_grammar_writes_are_read_back_and_printed_again(name, made, places):
    check(name, made, places=places)


@settings(max_examples=40, deadline=None)
@given(name=names, made=lists, thought=texts, places=cuts)
def test_calls_after_a_thought_with_calls_in_it_are_read_back(name, made, thought, places):
    thought = f"{thought}{WRITTEN[name]([('ping', {})])}\n{thought}".replace("</think>", "").replace("<think>", "")
    check(name, made, thought, places)


@pytest.mark.parametrize("name", TOOLS)
def test_calls_are_read_back_at_every_cut(name):
    made = [("write", {"path": "\n a\n", "kind": CHOICES[1], "part": {"ä": "<b>", "list": []}}), ("ping", {})]
    answer = WRITTEN[name](made)
    whole = read(name, [f"Hm.\n{answer}</think>{answer}"], True)
    for at in range(len(text := f"Hm.\n{answer}</think>{answer}")):
        assert read(name, [text[:at], text[at:]], True) == whole

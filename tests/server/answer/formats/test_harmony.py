"""Harmony, gpt-oss's format: messages in channels, parsed in any pieces, and constrained."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from headwater.config import ServeConfig
from headwater.request import Constraint, SamplingParams
from headwater.server.answer.dialect import Dialect, Start
from headwater.server.answer.formats import REASONING, reasoning_format
from headwater.server.answer.formats.harmony import CALLS, ENDS, RETURN
from headwater.server.answer.formats.parser import AnswerParser, joined
from headwater.server.requests.tools import FunctionDefinition, ToolUse
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER_TOOLS, cut, cuts, shape
from tests.server.answer.formats.test_grammar import taken
from tests.server.client import send
from tests.server.fake_engine import FakeEngine, byte_tokenizer

TEMPLATE = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
HARMONY = REASONING["harmony"]
BETWEEN = "<|end|><|start|>assistant"
THOUGHT, FINAL = "<|channel|>analysis<|message|>Hm.", "<|channel|>final<|message|>"
BONN = '{"city": "Bonn"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BONN}"


def parsed(pieces, tools=WEATHER_TOOLS, thinking=False, one=False):
    parser = AnswerParser(HARMONY, thinking, CALLS, tools, one=one)
    return shape(joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish()))


ANSWERS = {
    "final": (f"{THOUGHT}{BETWEEN}{FINAL}Hello.", ["r:Hm.", "c:Hello."]),
    "no thought": (f"{FINAL}Hello.", ["c:Hello."]),
    "end": (f"{THOUGHT}{BETWEEN}{FINAL}Hello.<|return|>", ["r:Hm.", "c:Hello."]),
    "form": ("<|channel|>final <|constrain|>json<|message|>{}", ["c:{}"]),
    "call": (f"{THOUGHT}{BETWEEN}{CALL}<|call|>", ["r:Hm.", ("weather", {"city": "Bonn"})]),
    "recipient first": (
        f"{THOUGHT}{BETWEEN} to=functions.weather<|channel|>commentary json<|message|>{BONN}",
        ["r:Hm.", ("weather", {"city": "Bonn"})],
    ),
    "no arguments": (" to=functions.ping<|channel|>commentary<|message|><|call|>", [("ping", {})]),
    "preamble": (
        f"{THOUGHT}{BETWEEN}<|channel|>commentary<|message|>Let me see.{BETWEEN}{CALL}",
        ["r:Hm.", "c:Let me see.", ("weather", {"city": "Bonn"})],
    ),
    "two thoughts": (f"{THOUGHT}{BETWEEN}{THOUGHT}{BETWEEN}{FINAL}Hi", ["r:Hm.\nHm.", "c:Hi"]),
    "no head": ("Hello, <|channel|>", ["c:Hello, <|channel|>"]),
    "head cut off": (f"{THOUGHT}{BETWEEN}<|channel|>fin", ["r:Hm."]),
    "thought cut off": (THOUGHT, ["r:Hm."]),
    "a text like a head": ("to=5 is right", ["c:to=5 is right"]),
    "a long text like a head": (f"to={'5' * 300}", [f"c:to={'5' * 300}"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_messages_are_reasoning_content_and_calls_by_their_channels(name):
    text, wanted = ANSWERS[name]
    assert parsed([text]) == wanted
    assert parsed(text) == wanted


@given(text=st.lists(st.sampled_from([*"ab <|{}\n", *ENDS, THOUGHT, FINAL, CALL, BETWEEN])).map("".join), places=cuts)
def test_cuts_of_the_text_change_nothing(text, places):
    def deltas(pieces):
        parser = AnswerParser(HARMONY, False, CALLS, WEATHER_TOOLS)
        return joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())

    assert deltas(cut(text, places)) == deltas([text])


def test_call_is_content_without_tools_and_an_answer_may_have_one():
    assert parsed([CALL], tools=None) == [f"c:{BONN}"]
    assert parsed([f"{CALL}{BETWEEN}{CALL}"], one=True) == [("weather", {"city": "Bonn"})]


def test_prompt_that_leaves_the_analysis_open_begins_with_reasoning():
    assert HARMONY.left_open_by(f"{PROMPT}{FINAL[:11]}analysis<|message|>")
    assert parsed([f"m.{BETWEEN}{FINAL}Hi"], thinking=True) == ["r:m.", "c:Hi"]


def test_arguments_are_streamed_as_they_come():
    parser = AnswerParser(HARMONY, False, CALLS, WEATHER_TOOLS)
    head, rest = CALL[: -len(BONN)], [BONN[:5], BONN[5:]]
    assert [len(parser.push(piece)) for piece in (head, *rest)] == [2, 1, 1]


def test_auto_finds_harmony_by_the_chat_template():
    assert reasoning_format("auto", TEMPLATE) is HARMONY
    assert reasoning_format("auto", "<|end|>") is None


@cache
def with_tags():
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())  # which other tests share
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in (*CALLS.tags, RETURN)])
    return tokenizer


def accepts(source, text):
    return taken(source, text, with_tags()) == (text, True)


def shaped(use, form=None, limit=None, end=PROMPT):
    dialect = Dialect(TEMPLATE, ServeConfig(), with_tags())
    return dialect.shaped(SamplingParams(), Start(end, limit), dialect.enforced(use, "")[0], form)


def test_form_is_held_in_the_final_channel_after_any_thought():
    form = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    source = shaped(ToolUse("none", {}), form).constraint.source
    for text in (f'{FINAL}{{"a": 1}}', f'{THOUGHT}{BETWEEN}{FINAL}{{"a": 1}}'):
        assert accepts(source, text)
    for text in ('{"a": 1}', f"{FINAL}Hi", f"{THOUGHT}{BETWEEN}{FINAL}Hi", THOUGHT):
        assert not accepts(source, text)
    inner = shaped(ToolUse("none", {}), form, end=PROMPT + FINAL).constraint.source
    assert accepts(inner, '{"a": 1}')


def test_required_call_is_one_of_a_known_tool_that_fits_its_schema():
    source = shaped(ToolUse("required", WEATHER_TOOLS)).constraint.source
    first = f" to=functions.weather<|channel|>commentary json<|message|>{BONN}"
    for text in (CALL, f"{THOUGHT}{BETWEEN}{CALL}", f"{THOUGHT}{BETWEEN}{first}"):
        assert accepts(source, text)
    for text in (f"{FINAL}Hi", CALL.replace("weather", "snow"), CALL.replace('"Bonn"', "3"), THOUGHT):
        assert not accepts(source, text)


def test_chosen_calls_are_held_and_other_messages_are_free():
    source = shaped(ToolUse("auto", WEATHER_TOOLS)).constraint.source
    preamble = f"<|channel|>commentary<|message|>Let me see.{BETWEEN}"
    for text in (
        f"{THOUGHT}{BETWEEN}{FINAL}Hello {{",
        f"{THOUGHT}{BETWEEN}{preamble}{THOUGHT}{BETWEEN}{CALL}",
        f"{preamble}{CALL}",
    ):
        assert accepts(source, text)
    for text in (CALL.replace("weather", "snow"), f"{THOUGHT}{BETWEEN}{CALL.replace('city', 'town')}"):
        assert not accepts(source, text)


def test_limit_of_reasoning_ends_the_analysis():
    source = shaped(ToolUse("none", {}), limit=3).constraint.source
    assert accepts(source, f"{THOUGHT}{BETWEEN}{FINAL}Hello")
    assert not accepts(source, f"{THOUGHT} And more.{BETWEEN}{FINAL}Hello")


def test_tags_that_the_parser_reads_are_shown():
    params = shaped(ToolUse("auto", {"ping": FunctionDefinition(name="ping")}))
    assert {with_tags().id_to_token(token) for token in params.shown_tokens} == set(CALLS.tags)


@pytest.mark.parametrize("name", ["final", "call"])
def test_server_answers_in_fields_of_the_api(name):
    text, tools = ANSWERS[name][0], [{"type": "function", "function": {"name": "weather"}}]
    engine = FakeEngine(script=text, chat_template=templates.HARMONY)
    engine.start()
    try:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 400}
        reply = send(engine, "POST", "/v1/chat/completions", json=body).json()["choices"][0]["message"]
    finally:
        engine.stop()
    assert engine.tokenizer.decode(engine.seen[0].prompt, skip_special_tokens=False).endswith("<|start|>assistant")
    assert reply["reasoning_content"] == "Hm."
    if name == "final":
        assert reply["content"] == "Hello."
    else:
        assert reply["tool_calls"][0]["function"] == {"name": "weather", "arguments": BONN}

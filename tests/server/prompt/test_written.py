"""Calls as the model wrote them, which the next turn's prompt repeats, whatever the template would print."""

from __future__ import annotations

import json

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.prompt import written
from headwater.server.prompt.rules import call_form_of
from headwater.server.prompt.template import ChatTemplate
from headwater.server.prompt.written import Call, WrittenCalls
from tests.server import templates
from tests.server.client import send_to
from tests.server.fake_engine import byte_tokenizer
from tests.server.templates import published

# values that templates print in other ways than models write them
VALUES = {"all": True, "none": None, "few": 1.0, "text": "é", "list": [1, True], "map": {"a": False}}
KINDS = {"all": "boolean", "none": "null", "few": "number", "text": "string", "list": "array", "map": "object"}
TOOL = {"name": "g", "parameters": {"type": "object", "properties": {k: {"type": t} for k, t in KINDS.items()}}}
XML = "".join(f"<parameter={k}>\n{v if k == 'text' else json.dumps(v)}\n</parameter>\n" for k, v in VALUES.items())
IN_XML = f"<tool_call>\n<function=g>\n{XML}</function>\n</tool_call>"
IN_JSON = f'<tool_call>\n{{"name": "g",  "arguments": {json.dumps(VALUES)}}}\n</tool_call>'
IN_LIST = f'<TOOLCALL>[{{"name": "g",  "arguments": {json.dumps(VALUES)}}}]</TOOLCALL>'
SOURCES = [
    pytest.param(templates.STRICT, IN_XML, id="strict"),
    pytest.param(templates.DROPPING, IN_LIST, id="dropping"),
    pytest.param(templates.LINES, IN_JSON, id="lines"),
]
REAL = {"qwen3.5-0.8b": IN_XML, "granite-4.0-h": IN_JSON, "nvidia-nemotron-nano-v2": IN_LIST}
for one in published():
    if one.id in REAL:
        SOURCES.append(pytest.param(one.values[0], REAL[one.id], id=one.id))

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"


def app_of(engine, source, script):
    engine.chat_template, engine.script = source, script
    return create_app(engine, ServeConfig())


def ask(app, path, turns, say="do it"):
    """Send a question and the turns after it, and return the answer's JSON."""
    function = {"type": "function", "function": TOOL}
    body = {
        CHAT: {"messages": [{"role": "user", "content": say}, *turns], "tools": [function]},
        OLLAMA: {"messages": [{"role": "user", "content": say}, *turns], "tools": [function], "stream": False},
        MESSAGES: {"messages": [{"role": "user", "content": say}, *turns], "max_tokens": 900,
                   "tools": [{"name": "g", "input_schema": TOOL["parameters"]}]},
        RESPONSES: {"input": [{"role": "user", "content": say}, *turns], "tools": [{"type": "function", **TOOL}]},
    }[path]  # fmt: skip
    (response,) = send_to(app, [("POST", path, {"json": {"model": "m", **body}})])
    assert response.status_code == 200, response.text
    return response.json()


def turns_after(path, answer):
    """Return an answer with a call and the call's result as a client sends them back."""
    if path == CHAT:
        sent = answer["choices"][0]["message"]
        return [sent, {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "done"}]
    if path == OLLAMA:
        return [answer["message"], {"role": "tool", "content": "done"}]
    if path == MESSAGES:
        id_ = next(block["id"] for block in answer["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": id_, "content": "done"}
        return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    return [*answer["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}]


def text_of(generation):
    return byte_tokenizer().decode(generation.prompt, skip_special_tokens=False)


@pytest.mark.parametrize(("source", "call"), SOURCES)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_next_prompt_repeats_the_call_as_generated(engine, source, call, path):
    thought = "Hm.\n</think>\n\n" if "TOOLCALL" in source and path != MESSAGES else ""
    app = app_of(engine, source, f"{thought}Well.\n\n{call}")
    ask(app, path, turns_after(path, ask(app, path, [])))
    assert call in text_of(engine.seen[1])


@pytest.mark.parametrize(("source", "call"), SOURCES)
def test_prompt_after_a_call_begins_with_prompt_and_answer(engine, source, call):
    app = app_of(engine, source, call)
    ask(app, MESSAGES, turns_after(MESSAGES, ask(app, MESSAGES, [])))  # without reasoning
    first, second = map(text_of, engine.seen)
    opened = first.removesuffix("<think></think>").removesuffix("<think>\n\n</think>\n\n")
    assert second.startswith(opened)
    assert call in second


def test_calls_that_a_client_changed_are_rendered_by_the_template(engine):
    app = app_of(engine, templates.LINES, IN_JSON)
    sent, result = turns_after(CHAT, ask(app, CHAT, []))
    sent["tool_calls"][0]["function"]["arguments"] = '{"all": false}'
    ask(app, CHAT, [sent, result])
    assert '{"name": "g", "arguments": {"all": false}}' in text_of(engine.seen[-1])


def test_texts_of_calls_are_kept_for_their_namespace_only():
    kept = WrittenCalls()
    kept.add("a", [Call("c1", "g", '{"all": true}')], "\n<call>")
    call = {"id": "c1", "function": {"name": "g", "arguments": {"all": True}}}
    assert kept.find("a", {"tool_calls": [call]}) == "\n<call>"
    assert kept.find("a", {"tool_calls": [{**call, "id": None}]}) == "\n<call>"
    assert kept.find("a", {"tool_calls": [{**call, "id": "c2"}]}) is None
    assert kept.find("a", {"tool_calls": [call, call]}) is None
    assert kept.find("b", {"tool_calls": [call]}) is None
    assert kept.find("a", {"content": "x"}) is None


def test_texts_of_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(written, "MAX_ANSWERS", 2)
    kept = WrittenCalls()
    for number in range(3):
        kept.add("", [Call(f"c{number}", f"g{number}", "{}")], "x" * 10)
    calls = [{"id": f"c{i}", "function": {"name": f"g{i}", "arguments": {}}} for i in range(3)]
    assert [kept.find("", {"tool_calls": [call]}) for call in calls] == [None, "x" * 10, "x" * 10]
    monkeypatch.setattr(written, "MAX_CHARACTERS", 20)
    kept.add("", [Call("c", "g", "{}")], "y" * 20)
    assert kept.find("", {"tool_calls": calls[2:]}) is None


def test_cut_call_comes_back_as_it_was_generated(engine):
    app = app_of(engine, templates.STRICT, IN_XML[:60])
    sent, result = turns_after(CHAT, ask(app, CHAT, []))
    ask(app, CHAT, [sent, result])
    assert IN_XML[:60] in text_of(engine.seen[-1])


def test_template_without_one_form_of_calls_has_none():
    assert call_form_of(ChatTemplate(templates.DEFAULT_SYSTEM)) is None
    assert call_form_of(ChatTemplate(templates.REASONING)).before == "<tool_call>"

"""Conversations drawn from roles, kinds of content, APIs and templates: all are answered, and have one prompt."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server import templates
from tests.server.client import send_to
from tests.server.fake_engine import FakeEngine
from tests.server.templates import published

OWN = {
    name: getattr(templates, name)
    for name in ("STRICT", "DROPPING", "LINES", "MARKING", "ALTERNATING", "TURNS", "SILENT")
}
SOURCES = {**OWN, **{str(one.id): one.values[0] for one in published() if one.values[0]}}
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
TEXTS = (
    "",
    "hi",
    " a\n",
    "<tool_response>\nx\n</tool_response>",
    "</think>",
    "<tool_call>",
    "/no_think",
    "é 🙂",
    "{{ x }}",
)
ARGUMENTS = ("", "{}", "null", "[1]", '"x"', '{"a": tr', '{"a": true, "b": null, "c": [1.0, {"d": "é"}]}')

text = st.sampled_from(TEXTS)
turns = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("system", "developer", "user", "assistant")), text),
        st.tuples(st.sampled_from(("system", "user", "assistant")), st.lists(text, max_size=3)),
        st.tuples(st.sampled_from(("user", "assistant")), st.none()),
        st.tuples(st.just("call"), st.sampled_from(ARGUMENTS)),
        st.tuples(st.just("result"), st.one_of(st.none(), text, st.lists(text, max_size=2))),
        st.tuples(st.just("image"), text),
        st.tuples(st.just("thought"), text),
    ),
    min_size=1,
    max_size=8,
)


def parts(content, kind="text"):
    return [{"type": kind, "text": one} for one in content] if isinstance(content, list) else content


def as_chat(turns):
    for role, content in turns:
        match role:
            case "call":
                call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": content}}
                yield {"role": "assistant", "content": None, "tool_calls": [call]}
            case "result":
                yield {"role": "tool", "tool_call_id": "c1", "content": parts(content)}
            case "image":  # which an answer follows
                yield {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": content}],
                }
                yield {"role": "assistant", "content": "I see."}
            case "thought":
                yield {"role": "assistant", "content": "x", "reasoning_content": content}
            case _:
                yield {"role": role, "content": parts(content)}


def as_messages(turns):
    for role, content in turns:
        match role:
            case "call":
                yield {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": content}}],
                }
            case "result":
                result = {"type": "tool_result", "tool_use_id": "c1", "content": parts(content)}
                yield {"role": "user", "content": [result, {"type": "text", "text": "so"}]}
            case "image":
                yield {"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}
                yield {"role": "assistant", "content": content}
            case "thought":
                yield {"role": "assistant", "content": [{"type": "thinking", "thinking": content, "signature": ""}]}
            case _:
                yield {"role": "system" if role == "developer" else role, "content": parts(content)}


def as_items(turns):
    for role, content in turns:
        match role:
            case "call":
                yield {"type": "function_call", "call_id": "c1", "name": "f", "arguments": content}
            case "result":
                yield {"type": "function_call_output", "call_id": "c1", "output": parts(content, "input_text")}
            case "image":
                yield {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
                yield {"role": "assistant", "content": [{"type": "output_text", "text": content}]}
            case "thought":
                yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": content}]}
            case _:
                kind = "output_text" if role == "assistant" else "input_text"
                yield {"type": "message", "role": role, "content": parts(content, kind)}


def as_ollama(turns):
    for role, content in turns:
        plain = "".join(content) if isinstance(content, list) else content
        match role:
            case "call":
                yield {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": plain}}}],
                }
            case "result":
                yield {"role": "tool", "content": plain, "tool_name": "f"}
            case "image":
                yield {"role": "user", "content": plain, "images": ["aGk="]}
                yield {"role": "assistant", "content": "I see."}
            case "thought":
                yield {"role": "assistant", "content": "x", "thinking": plain}
            case _:
                yield {"role": "system" if role == "developer" else role, "content": plain}


def body_of(path, turns):
    if path == RESPONSES:
        return {"input": [*as_items(turns), {"role": "user", "content": "go"}], "max_output_tokens": 1}
    form = {CHAT: as_chat, MESSAGES: as_messages, OLLAMA: as_ollama}[path]
    return {"messages": [*form(turns), {"role": "user", "content": "go"}], "max_tokens": 1, "stream": False}


@cache
def served(name):
    """Return an engine with a template, and an app over it."""
    engine = FakeEngine(chat_template=SOURCES[name], script="x")
    engine.start()
    return engine, create_app(engine, ServeConfig())


@pytest.fixture(autouse=True, scope="module")
def _stopped():
    yield
    for name in SOURCES:
        served(name)[0].stop()
    served.cache_clear()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=25, deadline=None)
@given(turns=turns)
def test_any_conversation_is_answered_and_has_one_prompt(name, path, turns):
    engine, app = served(name)
    body = {"model": "m", **body_of(path, turns)}
    answers = send_to(app, [("POST", path, {"json": body})] * 2)
    assert [answer.status_code for answer in answers] == [200, 200], (json.dumps(body), answers[0].text)
    assert engine.seen[-2].prompt == engine.seen[-1].prompt


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=15, deadline=None)
@given(turns=turns)
def test_answer_of_the_server_is_accepted_in_the_next_turn(name, turns):
    _, app = served(name)
    body = {"model": "m", **body_of(CHAT, turns)}
    (first,) = send_to(app, [("POST", CHAT, {"json": body})])
    body["messages"] += [first.json()["choices"][0]["message"], {"role": "user", "content": "and"}]
    (second,) = send_to(app, [("POST", CHAT, {"json": body})])
    assert second.status_code == 200, second.text

"""Shapes of conversations that users of other servers reported as errors: each is answered with every template."""

from __future__ import annotations

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server import templates
from tests.server.client import send_to
from tests.server.fake_engine import byte_tokenizer
from tests.server.templates import published

OWN = ("STRICT", "DROPPING", "LINES", "MARKING", "ALTERNATING", "TURNS")
SOURCES = [pytest.param(getattr(templates, name), id=name) for name in OWN] + published()
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def say(role, text):
    return {"role": role, "content": text}


def calls(*ids):
    function = {"name": "read", "arguments": "{}"}
    made = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id_, text="done"):
    return {"role": "tool", "tool_call_id": id_, "content": text}


def blocks(role, *content):
    return {"role": role, "content": list(content)}


USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
GOT = {"type": "tool_result", "tool_use_id": "t1", "content": "done"}
TEXT = {"type": "text", "text": "go"}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]}
ITEM = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
OUT = {"type": "function_call_output", "call_id": "c1"}
HI, GO = say("user", "hi"), say("user", "go")

SHAPES = {
    # anthropics/claude-code 3639, github/copilot-cli 330: a call whose result never came
    "a call without a result": (MESSAGES, [HI, blocks("assistant", USE), blocks("user", TEXT)]),
    # anthropics/claude-code 12692
    "a result without a call": (MESSAGES, [HI, blocks("assistant", TEXT), blocks("user", GOT, TEXT)]),
    # anomalyco/opencode 44852: of two parallel calls one failed
    "one result for two calls": (CHAT, [HI, calls("a", "b"), result("a"), GO]),
    # MoonshotAI/kimi-code 1292
    "a user's message between call and result": (CHAT, [HI, calls("a"), GO, result("a")]),
    # QwenLM/qwen-code 199: a result of a call that is not in the history
    "a result with an unknown id": (CHAT, [HI, calls("a"), result("z"), GO]),
    # vllm-project/vllm 25108: a template that takes one call at once
    "parallel calls": (CHAT, [HI, calls("a", "b"), result("a", "one"), result("b", "two")]),
    # vllm-project/vllm 6862, nextai-translator 34
    "two users": (CHAT, [say("system", "Be brief."), HI, GO]),
    # microsoft/semantic-kernel 10277
    "two assistants": (CHAT, [HI, say("assistant", "one"), say("assistant", "two"), GO]),
    # PromtEngineer/localGPT 720: a template without a system's role
    "a system": (CHAT, [say("system", "Be brief."), HI]),
    # Aider-AI/aider 5591
    "systems between users": (CHAT, [HI, say("system", "one"), say("system", "two"), GO, say("assistant", "x"), GO]),
    # magnitudedev/magnitude 84, sterlp/eclipse-peon-ai 75: a text, then a call of the assistant's
    "a text before a call": (CHAT, [HI, say("assistant", "I will."), calls("a"), result("a"), GO]),
    # anthropics/claude-code 2663
    "an empty content": (MESSAGES, [HI, blocks("assistant"), blocks("user", TEXT)]),
    # Wei-Shaw/sub2api 3677
    "a search that ran elsewhere": (MESSAGES, [HI, blocks("assistant", SEARCH, FOUND, TEXT), blocks("user", TEXT)]),
    # ggml-org/llama.cpp 23465: an output that is not only text
    "an image in an output": (RESPONSES, [HI, ITEM, {**OUT, "output": [{"type": "input_image", "image_url": "x"}]}]),
    # lmstudio-ai/lmstudio-bug-tracker 1064
    "several items": (RESPONSES, [HI, say("assistant", [{"type": "output_text", "text": "x"}]), GO]),
    # ggml-org/llama.cpp 20156, openai/codex 10635: tools of other types are fields of the request below
    "a call of a tool that is not offered": (RESPONSES, [HI, {**ITEM, "name": "gone"}, {**OUT, "output": "x"}, GO]),
}  # fmt: skip
TOOLS = [{"type": "namespace", "name": "n", "tools": []}, {"type": "web_search"}, {"type": "image_generation"}]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reported_shape_is_answered_whole(engine, source, shape):
    engine.chat_template = source
    path, turns = SHAPES[shape]
    more = {"max_tokens": 4} if path == MESSAGES else {}
    if path == RESPONSES:
        more = {"tools": TOOLS, "truncation": "auto", "service_tier": "auto", "stream": False, "store": False}
    body = {"model": "m", "input" if path == RESPONSES else "messages": turns, **more}
    (answer,) = send_to(create_app(engine, ServeConfig()), [("POST", path, {"json": body})])
    assert answer.status_code == 200, answer.text
    prompt = byte_tokenizer().decode(engine.seen[-1].prompt, skip_special_tokens=False)
    wanted = [turn["content"] for turn in turns if isinstance(turn.get("content"), str) and turn["content"]]
    assert all(text in prompt for text in wanted), prompt

"""Bodies with any value at any place: refused in OpenAI's form with the field's name, or answered, never with a 500."""

import copy
import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.requests.chat import ChatRequest, CompletionRequest
from headwater.server.requests.ollama import OllamaChatRequest, OllamaGenerateRequest
from headwater.server.requests.responses import ResponsesRequest
from tests.server import templates
from tests.server.client import assert_names_a_field, error
from tests.server.fake_engine import FakeEngine
from tests.support import FULL

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "segment": True}
SAMPLED = {
    "temperature": 1, "top_p": 0.5, "seed": 1, "stop": ["x"], "logit_bias": {"1": 2}, "stop_token_ids": [1],
    "stream_options": {"include_usage": True}, "timeout": 5, "min_tokens": 1, "repetition_penalty": 1, "user": "u",
}  # fmt: skip
OPTIONS = {
    "num_predict": 2, "temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 1, "stop": ["x"], "num_ctx": 64,
    "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "mirostat": 0, "typical_p": 1, "tfs_z": 1,
}  # fmt: skip
# path -> a body that is answered, in which each value may be replaced
BODIES = {
    "/v1/completions": {
        "prompt": ["abc"], "max_tokens": 2, "logprobs": 1, "structured_outputs": {"choice": ["a"]}, "n": 1, **SAMPLED,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [PART]},
            {"role": "user", "content": "hi", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        ],
        "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "documents": [{"text": "d", "title": "t"}], "chat_template_kwargs": {"a": 1}, "max_tokens": 2,
        "logprobs": True, "top_logprobs": 1, "metadata": {"a": "b"}, **SAMPLED,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "instructions": "i", "tools": [{"type": "function", **TOOL}], "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "max_output_tokens": 2,
    },
    "/v1/messages": {
        "max_tokens": 2, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "temperature": 1, "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"}, "model": "m",
    },
    "/api/chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "hi", "images": []},
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}},
            ]},
            {"role": "tool", "tool_name": "f", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": TOOL}], "format": {"type": "object"}, "think": True,
        "options": OPTIONS, "stream": False, "logprobs": True, "top_logprobs": 1, "keep_alive": "5m", "model": "m",
    },
    "/api/generate": {
        "prompt": "hi", "system": "s", "format": "json", "think": False, "raw": False, "options": OPTIONS,
        "stream": False, "images": [], "suffix": "", "template": "", "context": [], "keep_alive": 0, "model": "m",
    },
    "/api/show": {"model": "m", "name": "m", "verbose": True},
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": TOOL}]},
    "/detokenize": {"tokens": [1, 2]},
    "/cache/segments": {"texts": ["a" * 100], "cache_salt": "s"},
}  # fmt: skip
MORE = {  # names of further fields
    "/v1/completions": sorted(CompletionRequest.model_fields),
    "/v1/chat/completions": sorted({*ChatRequest.model_fields, *ChatRequest.neutral}),
    "/v1/responses": sorted({*ResponsesRequest.model_fields, *ResponsesRequest.neutral}),
    "/api/chat": sorted({*OllamaChatRequest.model_fields, *OllamaChatRequest.neutral}),
    "/api/generate": sorted({*OllamaGenerateRequest.model_fields, *OllamaGenerateRequest.neutral}),
}
NUMBERS = (0, -1, 1, 5, 0.5, -0.0, 1e-45, 1e-38, 1e308, 2**31, 2**63, -(2**63), 10**400)
TEXTS = (
    "",
    "x",
    "alien",
    "auto",
    "json",
    "\0",
    "\ud800",
    "{}",
    "[",
    "<tool_call>",
    "🙂" * 50,
    "root ::= [",
    "#/$defs/a",
)
LEAVES = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "text", "role", "content", "name", "function", "json", "$ref", "")),
            inner,
            max_size=3,
        )
    ),
    max_leaves=4,
)
EXAMPLES = 600 if FULL else 60  # of an endpoint: 3 s for all


def places(value, at=()):
    """Return the paths of all values within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


def replaced(body, place, value):
    """Return the body with another value at a place."""
    if not place:
        return value
    body = copy.deepcopy(body)
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return body


def bodies(path):
    """Return a strategy of bodies with one or two values replaced, taken away or added."""
    base = BODIES[path]
    here = st.sampled_from(places(base))
    there = st.sampled_from([(name,) for name in MORE.get(path, ["more"])])
    one = st.builds(lambda place, value: replaced(base, place, value), here, VALUES)
    return one | st.builds(lambda body, place, value: replaced(body, place, value) if isinstance(body, dict) else body,
                           one | st.just(base), there, VALUES)  # fmt: skip


@pytest.fixture(scope="module")
def ask():
    """Return a function that sends JSON to one app."""
    engine = FakeEngine(chat_template=templates.REASONING)
    engine.start()
    with TestClient(create_app(engine, ServeConfig()), raise_server_exceptions=False) as client:
        yield lambda path, body: client.post(path, content=json.dumps(body), headers=JSON)
    engine.stop()


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_changed_are_answered(ask, path):
    assert ask(path, BODIES[path]).status_code == 200, ask(path, BODIES[path]).text


@pytest.mark.parametrize("path", BODIES)
def test_any_value_at_any_place_is_answered_or_refused_by_name(ask, path):
    @given(body=bodies(path))
    @settings(max_examples=EXAMPLES, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    def holds(body):
        response = ask(path, body)
        if response.status_code == 200:
            return
        if path.startswith("/api/"):
            assert (response.status_code, set(response.json())) == (400, {"error"}), response.text
            assert isinstance(response.json()["error"], str)
            return
        if path == "/v1/messages":
            assert (response.status_code, response.json()["type"]) == (400, "error"), response.text
        told = response.json()["error"] if path == "/v1/messages" else error(response)
        if isinstance(body, dict):
            assert_names_a_field(told, path, body)

    holds()

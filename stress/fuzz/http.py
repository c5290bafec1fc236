"""Request bodies: raw bytes, and JSON put together of fields, to the whole API over an engine without a model.

Whatever comes, it is answered: with less than 500, and with errors in the form of the path's API.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

from headwater.config import ServeConfig
from headwater.server.app import create_app
from stress.answers import ERROR_FIELDS
from stress.fuzz.target import Drawn, Target
from tests.server.fake_engine import FakeEngine

OLLAMA = ("/api/chat", "/api/generate")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", *OLLAMA)
MAX_ENGINE_REQUESTS = 500  # of one fake engine, which remembers them all

HELLO = [{"role": "user", "content": "hello"}]
NUMBERS = (0, 1, -1, 2, 0.5, 1e308, 10**9, 2**63, -(2**63), 10**400, True, "1", None, [], {})
VALUES: dict[str, tuple[Any, ...]] = {
    "messages": (
        HELLO,
        [{"role": "system", "content": "be brief"}, *HELLO, {"role": "assistant", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": {"a": [None]}}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 5}],
        [{"role": "developer", "content": [{"type": "text"}]}],
        [{"role": [], "content": {}}],
        [{"role": "\ud800", "content": "\udfff"}],
        [],
        {},
        "hello",
        None,
    ),
    "prompt": ("hello", "", [1, 2], [[1], [2]], ["a", "b"], [], [[]], [-1], [10**9], [True], 5, None, ["a", 1]),
    "input": ("hello", "", HELLO, [], [{"type": "message", "role": "user", "content": "x"}], [{"type": "?"}], 5, None),
    "instructions": ("be brief", "", 5, None),
    "tokens": ([1, 2], [], [-1], [10**9], "a", None, [1.5]),
    "tools": (
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/a"}, "strict": True}}],
        [{"type": "function", "name": "f"}],
        [{"type": "web_search"}],
        [{}],
        [5],
        [],
        "f",
    ),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}, {}, 5, "x"),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        {"type": "json_schema"},
        {"type": "?"},
        {},
        5,
    ),
    "stop": ("a", ["a", "b"], [], [""], 5, [5], "x" * 10_000, ["x"] * 100),
    "stop_token_ids": ([1], [], [-1], [10**9], 5, ["a"]),
    "logit_bias": ({"1": 5}, {}, {"a": 1}, {"1": 1000}, {"99999999": 1}, {"1": None}, 5, [1]),
    "stream": (True, False, None, 5, "yes"),
    "stream_options": ({"include_usage": True}, {}, {"include_usage": 5}, 5),
    "cache_salt": ("a", "", "x" * 2000, 5, None),
    "chat_template_kwargs": (
        {"enable_thinking": False},
        {"messages": 5},
        {"tools": 5},
        {"add_generation_prompt": 1},
        5,
    ),
    "reasoning": ({"effort": "low"}, {}, 5),
    "text": ({"format": {"type": "text"}}, {"format": {"type": "json_schema"}}, 5),
    "metadata": ({"a": "b"}, 5),
    "user": ("me", 5),
    "logprobs": (True, False, 0, 5, 100, None),
    "echo": (True, False, 5),
    "model": ("m", 5, None),
    "options": ({"num_predict": 2, "seed": -1}, {"temperature": 5}, {"mirostat": 2}, {"top_k": 1.5}, {}, [], 5, None),
    "format": ("json", "", {"type": "object"}, {"$ref": "#"}, "yaml", 5, None),
    "think": (True, False, "high", "much", 5),
    "system": ("be brief", "", 5, None),
    "raw": (True, False, 5),
    "images": ([], ["aGk="], 5),
}
VALUES |= dict.fromkeys(
    (
        "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "n",
        "seed", "best_of", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "timeout",
    ),
    NUMBERS,
)  # fmt: skip
NAMES = tuple(VALUES)


class App:
    """The API, called without a socket. It is created again before its engine remembers too much."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._start()

    def post(self, path: str, raw: bytes) -> tuple[int, bytes]:
        if len(self._engine.seen) > MAX_ENGINE_REQUESTS:
            self._engine.stop()
            self._start()
        return self._loop.run_until_complete(self._post(path, raw))

    def _start(self) -> None:
        self._engine = FakeEngine(script="ok")
        self._engine.start()
        self._app = create_app(self._engine, ServeConfig())

    async def _post(self, path: str, raw: bytes) -> tuple[int, bytes]:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        parts: list[dict[str, Any]] = [{"type": "http.request", "body": raw, "more_body": False}]
        status, body = 0, b""

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()  # the client stays
            return parts.pop()

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, body


@cache
def app() -> App:
    return App()


def post(path: str, raw: bytes) -> None:
    status, body = app().post(path, raw)
    assert 200 <= status < 500, f"{path} answers {status}: {body[:500]!r}"
    if status >= 400:
        error = json.loads(body)["error"]
        assert isinstance(error, str) if path in OLLAMA else set(error) == ERROR_FIELDS, error


FIRST: dict[str, dict[str, Any]] = {  # path -> the field that a request needs
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "x"},
}


def raw_body(data: bytes) -> None:
    drawn = Drawn(data)
    post(drawn.choice(PATHS), drawn.rest)


def fields(data: bytes) -> None:
    drawn = Drawn(data)
    path = drawn.choice(PATHS)
    body = dict(FIRST.get(path, {"input": "x"}))
    for _ in range(drawn.below(8)):
        name = drawn.choice(NAMES)
        body[name] = drawn.choice(VALUES[name])
    post(path, json.dumps(body).encode())


def seed(path: int, body: object) -> bytes:
    return bytes([path]) + json.dumps(body).encode()


BODIES = Target(
    raw_body,
    [
        seed(0, {"messages": HELLO, "max_tokens": 3, "temperature": 0.5, "stream": True}),
        seed(0, {"messages": VALUES["messages"][3], "tools": VALUES["tools"][0], "tool_choice": "required"}),
        seed(1, {"prompt": ["a", "b"], "n": 2, "stop": ["x"], "logit_bias": {"5": 1.5}, "echo": True}),
        seed(2, {"input": HELLO, "instructions": "be brief"}),
        seed(3, {"prompt": "hello", "return_token_strs": True}),
        seed(4, {"tokens": [1, 2, 3]}),
        seed(5, {"messages": HELLO, "options": {"num_predict": 3, "stop": ["x"]}, "format": "json", "think": True}),
        seed(6, {"prompt": "hello", "raw": True, "options": {"temperature": 0}, "stream": False}),
    ],
    words=[f'"{name}": '.encode() for name in NAMES] + [b"1e999", b"NaN", b"\\ud800", b"null", b"[[[[", b'{"":'],
)
FIELDS = Target(fields, [bytes([p, 5, *range(i, i + 12)]) for p in range(len(PATHS)) for i in (0, 9, 20)])

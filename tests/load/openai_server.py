"""Small OpenAI-like server on a loopback socket: it answers in words, which count as tokens, or errs as requested."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
HOST = "127.0.0.1"
PATIENCE = 20  # seconds after which something that must happen has not


@dataclass
class Script:
    """Script of the answer to one request."""

    events: list[Json | str] = field(default_factory=list)  # a text is sent as it is
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Json = field(default_factory=dict)  # of any other status, or instead of events
    gap: float = 0.0  # seconds before each event
    hold_after: int | None = None  # events after which nothing more comes until the server stops
    done: bool = True  # ends with [DONE]


def words_of(body: Json) -> list[str]:
    """A prompt as tokens."""
    if "prompt" in body:
        prompt = body["prompt"]
        return prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
    return [f"{m['role']}:{word}" for m in body["messages"] for word in m["content"].split()]


def chunk(text: str, finish: str | None = None, **delta: Any) -> Json:
    """Return a chunk of a chat's stream."""
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int) -> Json:
    details = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": details, "headwater": {"reason": "diverged", "resumed_at": cached}}


class OpenAiServer:
    """Listens on a port of its own in a thread of its own; `bodies` are the requests that came."""

    def __init__(self, answer: Callable[[OpenAiServer, Json], Script] | None = None) -> None:
        self.bodies: list[Json] = []
        self.heads: list[str] = []
        self.holding = threading.Event()  # an answer has come to its `hold_after`
        self.pages: dict[str, Json] = {"/v1/models": {"data": [{"id": "words-1"}]}, "/health": {"status": "ok"}}
        self.answer = answer or (lambda server, body: server.talk(body))
        self._known: list[list[str]] = []
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> OpenAiServer:
        self._thread.start()
        assert self._listening.wait(PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def talk(self, body: Json, gap: float = 0.0) -> Script:
        """max_tokens words, and a cache that remembers whatever prompts it saw."""
        words, n = words_of(body), body.get("max_tokens", 4)
        cached = max((common(words, known) for known in self._known), default=0)
        self._known.append(words)
        said = [f"w{i} " for i in range(n)]
        if "prompt" in body:
            events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in said]
            events[-1]["choices"][0]["finish_reason"] = "length"
        else:
            events = [chunk("", role="assistant"), *(chunk(text) for text in said), chunk("", "length")]
        return Script([*events, usage(len(words), n, min(cached, len(words) - 1))], gap=gap)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, HOST, 0, backlog=512))
        self._listening.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._server.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._respond(head, reader, writer)
        writer.close()

    async def _respond(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            page = self.pages.get(path)
            self._whole(writer, 404 if page is None else 200, page or {"error": {"message": f"no {path}"}})
            return
        fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        self.heads.append(head)
        self.bodies.append(body)
        script = self.answer(self, body)
        if script.status != 200 or script.body:
            self._whole(writer, script.status, script.body, script.headers)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, event in enumerate(script.events):
            if number == script.hold_after:
                self.holding.set()
                await asyncio.Event().wait()
            if script.gap:
                await asyncio.sleep(script.gap)
            self._piece(writer, (event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n").encode())
            await writer.drain()
        self._piece(writer, b"data: [DONE]\n\n" if script.done else b": over\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _piece(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Json, headers: Json | None = None) -> None:
        data = json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(data)}"]
        lines += [f"{name}: {text}" for name, text in (headers or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


def common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

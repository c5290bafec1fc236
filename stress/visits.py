"""Visits of clients to a server, one function per kind. Each returns its outcome, or raises Wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from stress.answers import Choices, StreamReader, Wrong, choices_of, judge_refusal
from stress.draw import SALTS, SCHEMA, TOOLS, Draw

Body = dict[str, Any]
Keep = Callable[[str, Body, Choices], None]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LEFT = "client left"
TINY_BUFFER = 2048  # bytes that a slow reader's socket takes


@dataclass(frozen=True)
class Client:
    """Client of the soak: its connections, its random draws, and the sample of answers to compare."""

    http: httpx.AsyncClient
    port: int
    draw: Draw
    keep: Keep
    max_running: int


async def post(client: Client, path: str, body: Body) -> tuple[str, Choices]:
    """A request whose whole answer is read."""
    reply = await client.http.post(path, json=body)
    if reply.status_code != 200:
        return judge_refusal(reply.status_code, reply.json(), reply.headers.get("retry-after")), {}
    return "answered", choices_of(reply.json())


async def stream(client: Client, path: str, body: Body, leave_after: int | None = None) -> tuple[str, Choices]:
    """A streamed request whose client leaves after some events."""
    reader = StreamReader()
    async with client.http.stream("POST", path, json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            refusal = json.loads(await reply.aread())
            return judge_refusal(reply.status_code, refusal, reply.headers.get("retry-after")), {}
        async for chunk in reply.aiter_raw():
            reader.feed(chunk)
            if leave_after is not None and reader.events >= leave_after:
                return LEFT, {}
    return reader.outcome(), reader.choices


def either(client: Client) -> tuple[str, Body]:
    if client.draw.rng.random() < 0.6:
        return CHAT, client.draw.chat()
    return COMPLETIONS, client.draw.completion()


async def asks(client: Client) -> str:
    return (await post(client, *either(client)))[0]


async def asks_for_comparison(client: Client) -> str:
    path, body = either(client)
    body = client.draw.comparable(body)
    way = post if client.draw.rng.random() < 0.5 else stream
    outcome, choices = await way(client, path, body)
    if choices and outcome == "answered":
        client.keep(path, body, choices)
    return outcome


async def streams(client: Client) -> str:
    return (await stream(client, *either(client)))[0]


async def chats_on(client: Client) -> str:
    """A conversation of three turns: each has the one before as its beginning."""
    body = client.draw.comparable(client.draw.chat(n=1, max_tokens=24))
    for _ in range(3):
        outcome, choices = await post(client, CHAT, body)
        if outcome != "answered":
            return outcome
        client.keep(CHAT, body, choices)
        turns = [
            {"role": "assistant", "content": choices[0].text},
            {"role": "user", "content": client.draw.words(1, 40)},
        ]
        body = {**body, "messages": [*body["messages"], *turns]}
    return "answered"


async def leaves_midway(client: Client) -> str:
    return (await stream(client, CHAT, client.draw.long_answer(), client.draw.rng.randint(1, 30)))[0]


async def hangs_up(client: Client) -> str:
    """Goes before the first byte of an answer, of a stream or not."""
    path, body = either(client)
    body["stream"] = client.draw.rng.random() < 0.5
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(request_bytes(path, body))
    await writer.drain()
    await asyncio.sleep(client.draw.rng.choice([0, 0.01, 0.1]))
    writer.transport.abort()
    del reader
    return LEFT


async def reads_slowly(client: Client) -> str:
    """A stream through a tiny buffer, sip by sip; some lose interest."""
    leaves = client.draw.rng.random() < 0.5
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BUFFER)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", client.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=TINY_BUFFER)
    try:
        writer.write(request_bytes(CHAT, client.draw.long_answer(), close=True))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = b""
        for _ in range(40):
            await asyncio.sleep(0.05)
            body += await reader.read(TINY_BUFFER)
        if leaves:
            return LEFT
        body += await reader.read(-1)
    finally:
        writer.transport.abort()
    return judge_raw(head, body)


def judge_raw(head: str, body: bytes) -> str:
    """The outcome of a stream whose connection was closed, by the bytes that came."""
    status = int(head.split()[1])
    if status == 200:
        if not body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise Wrong(f"a slow reader's stream ends with {body[-100:]!r}")
        return "answered"
    headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    return judge_refusal(status, json.loads(body), headers.get("retry-after"))


def request_bytes(path: str, body: Body, close: bool = False) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    )
    return (head + ("connection: close\r\n" if close else "") + "\r\n").encode() + data


async def floods(client: Client) -> str:
    """Many at once, more than may run and wait."""
    waves = [post(client, *either(client)) for _ in range(4 * client.max_running)]
    outcomes = {outcome for outcome, _ in await asyncio.gather(*waves)}
    return "some turned away" if "turned away" in outcomes else "answered"


async def sets_deadline(client: Client) -> str:
    body = client.draw.chat(timeout=client.draw.rng.choice([0.001, 0.05, 0.3, 1]), max_tokens=200, ignore_eos=True)
    way = post if client.draw.rng.random() < 0.5 else stream
    return (await way(client, CHAT, body))[0]


async def brings_tools(client: Client) -> str:
    return (await post(client, CHAT, client.draw.chat(tools=TOOLS)))[0]


async def wants_json(client: Client) -> str:
    """Check that a complete answer fits its schema, or that a server without schemas refuses it."""
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    body = client.draw.comparable(client.draw.chat(response_format=form, max_tokens=100))
    for name in ("stop", "logit_bias", "ignore_eos"):
        body.pop(name, None)
    outcome, choices = await post(client, CHAT, body)
    for choice in choices.values():
        if choice.finish_reason == "stop" and set(json.loads(choice.text)) != {"river", "miles"}:
            raise Wrong(f"a schema's answer is {choice.text!r}")
    if choices:
        client.keep(CHAT, body, choices)
    return outcome


async def asks_by_the_newer_api(client: Client) -> str:
    body = {"input": client.draw.words(1, 200), "max_output_tokens": 20, "cache_salt": client.draw.rng.choice(SALTS)}
    reply = await client.http.post(RESPONSES, json=body)
    if reply.status_code != 200:
        return judge_refusal(reply.status_code, reply.json(), reply.headers.get("retry-after"))
    if reply.json()["status"] not in ("completed", "incomplete"):
        raise Wrong(f"{RESPONSES} says {reply.json()['status']!r}")
    return "answered"


async def asks_too_much(client: Client) -> str:
    """A prompt that is longer than the memory."""
    reply = await client.http.post(COMPLETIONS, json={"prompt": [5] * 40_000, "max_tokens": 10})
    outcome = judge_refusal(reply.status_code, reply.json(), reply.headers.get("retry-after"))
    if reply.status_code != 400:
        raise Wrong(f"a prompt of 40,000 tokens: status {reply.status_code}")
    return outcome


async def talks_nonsense(client: Client) -> str:
    path = client.draw.rng.choice([CHAT, COMPLETIONS])
    raw = client.draw.rng.choice(NONSENSE)
    reply = await client.http.post(path, content=raw, headers={"content-type": "application/json"})
    if not 400 <= reply.status_code < 500:
        raise Wrong(f"{raw[:80]!r} is answered with {reply.status_code}")
    return judge_refusal(reply.status_code, reply.json(), None)


NONSENSE = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"messages": []}',
    b'{"messages": "hello", "prompt": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": -2}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 1000000000}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "n": 1e9}',
    b'{"messages": [{"content": "x"}], "prompt": []}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "prompt": [99999999]}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "logit_bias": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "stop": 5}',
    b"[" * 100_000,
)


async def looks(client: Client) -> str:
    """The pages that describe the server, while it is busy."""
    path = client.draw.rng.choice(["/health", "/metrics", "/cache", "/v1/models", "/nothing"])
    status = (await client.http.get(path)).status_code
    if status != (404 if path == "/nothing" else 200):
        raise Wrong(f"{path}: status {status}")
    return "answered"


# how often each is drawn
KINDS: dict[Callable[[Client], Awaitable[str]], int] = {
    asks: 12,
    asks_for_comparison: 14,
    streams: 10,
    chats_on: 8,
    leaves_midway: 8,
    hangs_up: 8,
    reads_slowly: 3,
    floods: 3,
    sets_deadline: 6,
    brings_tools: 4,
    wants_json: 4,
    asks_by_the_newer_api: 5,
    asks_too_much: 2,
    talks_nonsense: 8,
    looks: 6,
}

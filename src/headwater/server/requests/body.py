"""Body of a request: JSON of bounded size, depth and number of values, whose texts are valid UTF-8.

A large body is scanned while it arrives, so that one beyond the limits is refused before it is parsed: a parser would
first build all its objects, and 60 MB of empty lists take 80 seconds and 3 GB.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from headwater.server.http.errors import MODEL, TYPES, RefusedBody, json_type
from headwater.server.http.exchange import CLIENT_GONE

MAX_LOOP_BYTES = 2**20  # bytes that are parsed on the event loop; larger bodies would block other requests
# one thread: more would only compete with the event loop for the GIL
LARGE_BODY_THREAD = ThreadPoolExecutor(1, "large-body")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
PIECE_BYTES = 64 * 2**10  # bytes that are scanned without a pause for other requests: at most some milliseconds
MAX_DEPTH = 64  # of nested lists and objects
MAX_BYTES = 16 * 2**20  # of a body: JSON of that size takes about 50 ms, in which no other thread runs
MIN_VALUES, MIN_CONTAINERS = 200_000, 50_000  # accepted whatever the model's length
ID_BYTES = 16  # of a value outside of strings: a token's id takes at most 7, a separator, and some white space
MIN_MESSAGE_TOKENS = 4  # at least, in any chat template: its role and the tokens around it
ESCAPE_BYTES = 6  # bytes of a character's escape, such as \u0041
STRING = re.compile(rb'"[^"]*(?:"|\Z)')
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
DEPTH_STEPS = np.zeros(256, np.int64)  # change of depth at a byte
DEPTH_STEPS[list(b"[{")], DEPTH_STEPS[list(b"]}")] = 1, -1


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body, from the longest prompt that the server takes.

    `values` are all of a JSON text, `containers` its lists and objects; a prompt of token ids has a value a token.
    """

    tokens: int  # of a prompt with its answer
    token_bytes: int | None  # that one token can stand for; None: not bounded
    bytes: int
    values: int
    containers: int

    @staticmethod
    def of(tokens: int, token_bytes: int | None, prompts: int) -> BodyLimits:
        """Derive the limits for requests of at most this many prompts."""
        values = max(MIN_VALUES, 2 * tokens)
        containers = max(MIN_CONTAINERS, tokens // MIN_MESSAGE_TOKENS)
        size = MAX_BYTES
        if token_bytes is not None:
            size = min(MAX_BYTES, ID_BYTES * values + ESCAPE_BYTES * prompts * tokens * token_bytes)
        return BodyLimits(tokens, token_bytes, size, values, containers)

    @staticmethod
    def widest(limits: Iterable[BodyLimits]) -> BodyLimits:
        """Return limits that refuse no body that is within one of these."""
        of_fields = zip(*map(astuple, limits), strict=True)
        widest: list[Any] = [None if None in values else max(values) for values in of_fields]
        return BodyLimits(*widest)


class BodyScan:
    """State of the scan of one body. Bodies that are not JSON pass, for the parser to describe the error."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._carried = b""  # a backslash, whose character is in the next piece
        self._in_string = False
        self._depth = self._outside = self._values = self._containers = 0
        self._text = 0  # bytes of the open string, or somewhat fewer

    def take(self, chunk: bytes) -> Iterator[None]:
        """Scan the next bytes of the body, and yield after each piece. Raises RefusedBody beyond a limit."""
        for start in range(0, len(chunk), PIECE_BYTES):
            self._take(chunk[start : start + PIECE_BYTES])
            yield

    def _take(self, piece: bytes) -> None:
        piece = self._carried + piece
        end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece, self._carried = piece[:end], piece[end:]
        escapes = 0
        if b"\\" in piece:
            escapes = piece.count(b"\\")
            piece = piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
        outside = STRING.sub(b"", b'"' + piece if self._in_string else piece)
        self._in_string ^= piece.count(b'"') % 2 == 1
        self._measure_text(piece, escapes)
        self._count(outside)

    def _measure_text(self, piece: bytes, escapes: int) -> None:
        last = piece.rfind(b'"')
        if not self._in_string:
            self._text = 0
            return
        begun = self._text if last < 0 else 0
        size = len(piece) - (last + 1)  # of which an escape may be cut at its start
        self._text = begun + max(size - (ESCAPE_BYTES - 1) * (escapes + 1), size // ESCAPE_BYTES - 1, 0)
        limits = self._limits
        if limits.token_bytes is not None and self._text > limits.tokens * limits.token_bytes:
            found = (
                f"body has a text of {self._text:,} bytes or more, at least {self._text // limits.token_bytes:,} tokens"
            )
            raise RefusedBody(f"{found}; {limits.tokens:,} are accepted with the answer", "context_length_exceeded")

    def _count(self, outside: bytes) -> None:
        limits = self._limits
        brackets = outside.translate(None, NO_BRACKETS)
        if brackets:
            depths = self._depth + np.cumsum(DEPTH_STEPS[np.frombuffer(brackets, np.uint8)])
            self._depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                raise too_deep()
        opened = brackets.count(b"[") + brackets.count(b"{")
        self._containers += opened
        self._values += opened + outside.count(b",")
        self._outside += len(outside)
        for name, found, most in (
            ("lists and objects", self._containers, limits.containers),
            ("values", self._values, limits.values),
            ("bytes outside of texts", self._outside, ID_BYTES * limits.values),
        ):
            if found > most:
                raise RefusedBody(f"body has {found:,} {name} or more, at most {most:,} are accepted")


def too_deep() -> RefusedBody:
    """Return the error for a body that is nested too deep."""
    return RefusedBody(f"body has lists and objects nested more than {MAX_DEPTH} deep, which is the limit")


class JsonRoute(APIRoute):
    """Route that reads its body, if any, as a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return checked


class JsonRequest(Request):
    """Request that checks its body; it raises HTTPException, the only error that FastAPI passes on then."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HTTPException(415, f"content-type is {kind[:100]!r}, must be 'application/json'")
        limits: BodyLimits = self.app.state.body_limits
        size = int(self.headers.get("content-length", 0))
        if size > limits.bytes:
            raise too_large(size, limits.bytes)
        size, scan = 0, BodyScan(limits)
        held: list[bytes] = []  # of a body that is small so far
        async for chunk in super().stream():
            size += len(chunk)
            if size > limits.bytes:
                raise too_large(size, limits.bytes)
            held.append(chunk)
            if size > MAX_LOOP_BYTES:
                for _ in scan.take(b"".join(held)):
                    await asyncio.sleep(0)  # other requests continue meanwhile
                held.clear()
            yield chunk

    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect as error:
            raise HTTPException(CLIENT_GONE, "the client left before its request was complete") from error

    async def json(self) -> Any:
        raw = await self.body()
        if len(raw) <= MAX_LOOP_BYTES:
            value = parse(raw)
        else:
            value = await asyncio.get_running_loop().run_in_executor(LARGE_BODY_THREAD, parse, raw)
        if isinstance(value, dict):  # for the log of a refusal
            self.scope[TYPES] = {name: json_type(field) for name, field in value.items()}
            self.scope[MODEL] = value.get("model") or value.get("name")  # an older name, of Ollama
        return value


def too_large(size: int, most: int) -> RefusedBody:
    """Return the error for a body that has too many bytes."""
    return RefusedBody(f"body has {size:,} bytes or more, at most {most:,} are accepted", status=413)


def parse(raw: bytes) -> Any:
    """Decode JSON in UTF-8 (RFC 8259, section 8.1), which the scan of large bodies expects, too.

    Escaped halves of surrogate pairs, sent by clients that cut texts by UTF-16 units, become U+FFFD.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise HTTPException(400, f"body is not JSON: {error}") from error
    # most bodies have too few brackets to be deep, and no surrogates: they are not walked
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or SURROGATE_ESCAPE.search(raw):
        return _mended(value, MAX_DEPTH)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _mended(value: Any, levels: int) -> Any:
    """Replace halves of surrogate pairs; `levels`: lists and objects that may still be nested in the value."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if not isinstance(value, list | dict):
        return value
    if levels == 0:
        raise too_deep()
    if isinstance(value, list):
        return [_mended(item, levels - 1) for item in value]
    return {_mended(key, levels - 1): _mended(item, levels - 1) for key, item in value.items()}

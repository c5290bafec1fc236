"""Body of a request: JSON of bounded size, depth and number of values, whose texts are valid UTF-8."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from headwater.server.http.errors import TYPES, RefusedBody, json_type
from headwater.server.http.exchange import CLIENT_GONE
from headwater.server.requests.scan import MAX_DEPTH, BodyLimits, BodyScan, too_deep

MAX_LOOP_BYTES = 2**20  # bytes that are parsed on the event loop; larger bodies would block other requests
# one thread: more would only compete with the event loop for the GIL
LARGE_BODY_THREAD = ThreadPoolExecutor(1, "large-body")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


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

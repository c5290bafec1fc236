"""Answers that end when their client does: server-sent events, and work that stops when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MAX_HELD = 16_384  # characters

Outcome = TypeVar("Outcome")


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called however the stream ends, also when the client leaves.

    Events are held until `flush`, or until there are many: what is ready at once is written at once.
    """

    def __init__(self, content: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._close = close
        self._held: list[str] = []
        self._send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def stream_response(self, send: Send) -> None:
        self._send = send
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        held = 0
        async for text in self.body_iterator:
            assert isinstance(text, str)
            self._held.append(text)
            held += len(text)
            if held > MAX_HELD:
                held = 0
                await self.flush()
                await asyncio.sleep(0)  # a stream that is never short of events must not keep the others waiting
        await self.flush()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def flush(self) -> None:
        """Write what is held."""
        if self._held and self._send is not None:
            body = "".join(self._held).encode()
            self._held.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def unless_gone(request: Request, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """The work's result, or None if the client disconnects before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

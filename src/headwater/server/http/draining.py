"""Start and end of a server: work beside its requests, and draining before it stops.

Draining refuses new requests, leaves time to the running ones, then stops the engine, then closes the connections.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

LINGER = 5  # seconds for open answers to be written after the engine has ended them


def during(app: FastAPI, part: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Enter `part` when the app starts, after the parts that were added before, and leave it when the app ends."""
    outer = app.router.lifespan_context

    @asynccontextmanager
    async def both(started: FastAPI) -> AsyncIterator[Any]:
        async with outer(started) as state, part():
            yield state

    app.router.lifespan_context = both


class DrainedEngine(Protocol):
    """Engine that can be drained."""

    def refuse_new(self) -> None: ...

    def stop(self) -> None: ...


class InFlight:
    """Count of the requests that compute, until the last byte of their answers is written."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app so that its POST requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            self.count += 1
            try:
                await app(scope, receive, send)
            finally:
                self.count -= 1

        return counted


class DrainingServer(uvicorn.Server):
    """Server that drains at SIGTERM or SIGINT: it stops the engine when it is idle, or after `drain` seconds.

    Until then new requests are refused, and /health reports "draining". A second SIGINT stops at once and sets
    `interrupted`.
    """

    def __init__(self, config: uvicorn.Config, in_flight: InFlight, engine: DrainedEngine, drain: float) -> None:
        super().__init__(config)
        self._in_flight, self._engine, self._drain = in_flight, engine, drain
        self._deadline: float | None = None  # monotonic; None: no signal has come
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record a signal, and no more: the interrupted thread may hold the engine's lock."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain
        elif sig == signal.SIGINT:
            self.force_exit = self.interrupted  # a third SIGINT drops the answers that are not written yet
            self.interrupted = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends; uvicorn calls this ten times a second."""
        ends = await super().on_tick(counter)
        if self._deadline is None:
            return ends
        self._engine.refuse_new()
        late = self.interrupted or time.monotonic() >= self._deadline
        if late or not self._in_flight.count:
            await asyncio.to_thread(self._engine.stop)
            return True
        return ends

"""The ordered end: no new requests, time for the running ones, then the engine, then the connections."""

from __future__ import annotations

import asyncio
import signal
import time
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

LINGER = 5  # seconds that open answers have to be written once the engine has ended them


class DrainedEngine(Protocol):
    """What the end needs of an engine."""

    def refuse_new(self) -> None: ...

    def stop(self) -> None: ...


class InFlight:
    """Counts the requests that compute, until the last byte of their answers is written."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self, app: ASGIApp) -> ASGIApp:
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
    """At SIGTERM or SIGINT the engine takes no more; `drain` seconds later it is stopped, or as soon as it is idle.

    Until then new requests are refused, and /health says that it drains. A second SIGINT waits for nobody:
    `interrupted` says whether there was one.
    """

    def __init__(self, config: uvicorn.Config, in_flight: InFlight, engine: DrainedEngine, drain: float) -> None:
        super().__init__(config)
        self._in_flight, self._engine, self._drain = in_flight, engine, drain
        self._deadline: float | None = None  # of the clock; None: nobody has asked for an end
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: only noted here, for the engine's lock may be held by whoever it interrupts."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain
        elif sig == signal.SIGINT:
            self.force_exit = self.interrupted  # a third leaves what is not written yet
            self.interrupted = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; true ends it."""
        ends = await super().on_tick(counter)
        if self._deadline is None:
            return ends
        self._engine.refuse_new()
        late = self.interrupted or time.monotonic() >= self._deadline
        if late or not self._in_flight.count:
            await asyncio.to_thread(self._engine.stop)
            return True
        return ends

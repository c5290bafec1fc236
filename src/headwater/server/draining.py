"""The ordered end: no new requests, time for the running ones, then the engine, then the connections."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.errors import EngineStopped
from headwater.server import errors

LINGER = 5  # seconds that open answers have to be written once the engine has ended them


class Gate:
    """Counts the requests that compute, and takes no more once it is closed; then /health says that it drains."""

    def __init__(self, retry_after: int) -> None:
        self.inside = 0
        self.closed = False
        self._headers = {"retry-after": str(retry_after)}

    def close(self) -> None:
        self.closed = True

    def guard(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self.closed and scope["type"] == "http" and scope["path"] == "/health":
                health = JSONResponse({"status": "draining", "requests": self.inside}, 503, self._headers)
                await health(scope, receive, send)
            elif scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
            elif self.closed:
                status, body = errors.error_body(EngineStopped("the server is stopping and takes no more requests"))
                await JSONResponse(body, status, self._headers)(scope, receive, send)
            else:
                self.inside += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self.inside -= 1

        return guarded


class DrainingServer(uvicorn.Server):
    """SIGTERM or SIGINT closes the gate; when all are out, or `drain` seconds later, `stop_engine` fails the rest.

    A second SIGINT waits for nobody. `interrupted` says whether there was one.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, drain: float, stop_engine: Callable[[], None]) -> None:
        super().__init__(config)
        self._gate, self._drain, self._stop_engine = gate, drain, stop_engine
        self._deadline = 0.0
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._gate.closed:
            self._gate.close()
            self._deadline = time.monotonic() + self._drain
        elif sig == signal.SIGINT:
            self.force_exit = self.interrupted  # a third does without writing what is written
            self.interrupted = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; true ends it."""
        ends = await super().on_tick(counter)
        late = self.interrupted or time.monotonic() >= self._deadline
        if self._gate.closed and (late or not self._gate.inside):
            await asyncio.to_thread(self._stop_engine)
            return True
        return ends

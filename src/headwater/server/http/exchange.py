"""Exchange of one HTTP request with the engine: generations go in, events come back, and are streamed to the client.

Events come from the engine's thread to the event loop. If the client disconnects, its generations are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from headwater.cache.view import CacheView
from headwater.engine.meter import EngineStats
from headwater.events import Event, FailedEvent, FinishedEvent, PromptEvent, TokenEvent
from headwater.request import Generation
from headwater.spec import ModelSpec

CLIENT_GONE = 499  # status in the log if the client disconnected
EVENTS_TYPE = "text/event-stream"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second keeps nginx from buffering
MAX_HELD_CHARACTERS = 16_384  # characters of events that a stream holds before it writes them

Progress = PromptEvent | TokenEvent | FinishedEvent
Prefilled = tuple[int, int] | None  # computed and all tokens of prompts; None: not known
Events = AsyncIterator[tuple[int, Progress]]  # each with the number of its generation within the request
Outcome = TypeVar("Outcome")


class ServedEngine(Protocol):
    """Engine as the server uses it."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token and others, by the names that the template uses
    model_name: str
    spec: ModelSpec
    generation_defaults: dict[str, Any]

    @property
    def draft_bytes(self) -> int: ...

    @property
    def mtp_bytes(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def prefilled(self, request_id: int) -> Prefilled: ...

    def health(self) -> dict[str, Any]: ...

    def stats(self) -> EngineStats: ...

    def view(self) -> CacheView: ...


class Exchange:
    """Generations of one request, numbered from 0, and their events in the order in which the engine sent them."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Event]] = deque()
        self._awake = asyncio.Event()
        self._waking = False  # a wake-up is scheduled on the loop: one serves all events that arrive before it
        self.before_waiting: Callable[[], Awaitable[None]] | None = (
            None  # called when all arrived events have been read
        )
        self._open: dict[int, int] = {}  # number of a generation that has not ended -> the engine's id
        self._cancelled = False

    def submit_all(self, generations: list[Generation]) -> None:
        """Submit all or none; raises what the engine raises. May be called on another thread."""
        try:
            for number, generation in enumerate(generations):
                self._open[number] = self._engine.submit(generation, self._receiver(number))
                if self._cancelled:  # meanwhile, on the event loop
                    self.cancel()
                    return
        except Exception:
            self.cancel()
            raise

    async def events(self) -> Events:
        """Yield (number, event) until all generations have ended; raises the error of one that failed."""
        while self._open:
            if not self._arrived:
                await self._wait()
            number, event = self._arrived.popleft()
            if isinstance(event, FinishedEvent | FailedEvent):
                self._open.pop(number)
            if isinstance(event, FailedEvent):
                raise event.error
            yield number, event

    def cancel(self) -> None:
        """Cancel the generations that have not ended; may be called at any time."""
        self._cancelled = True
        for request_id in tuple(self._open.values()):
            self._engine.cancel(request_id)
        self._open.clear()

    @property
    def prefilled(self) -> Prefilled:
        """Computed and all tokens of the prompts whose answers have not ended; None if the engine does not know."""
        found = [self._engine.prefilled(request_id) for request_id in tuple(self._open.values())]
        known = [one for one in found if one is not None]
        return (sum(done for done, _ in known), sum(tokens for _, tokens in known)) if known else None

    async def _wait(self) -> None:
        if self.before_waiting is not None:
            await self.before_waiting()
        while not self._arrived:  # a late wake-up may be for events that were read already
            self._awake.clear()
            await self._awake.wait()

    def _receiver(self, number: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            self._arrived.append((number, event))
            if not self._waking:
                self._waking = True
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._wake)

        return on_event

    def _wake(self) -> None:
        self._waking = False
        self._awake.set()


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Text that a stream writes after `seconds` without any other; the first at once if `now`."""

    seconds: float
    text: Callable[[], str]
    now: bool = False


class EventStream(StreamingResponse):
    """Events as text. `close` is called when the stream ends for any reason, also when the client disconnects.

    Events are held until `flush`, or until there are many: events that are ready together are written together.
    """

    def __init__(
        self,
        content: AsyncIterator[str],
        close: Callable[[], None],
        media_type: str = EVENTS_TYPE,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        super().__init__(content, media_type=media_type, headers=STREAM_HEADERS)
        self._close, self._keep_alive = close, keep_alive
        self._held: list[str] = []
        self._send: Send | None = None
        self._written = -math.inf if keep_alive is not None and keep_alive.now else time.monotonic()  # last write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def stream_response(self, send: Send) -> None:
        self._send = send
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        kept = None if self._keep_alive is None else asyncio.create_task(self._keep(self._keep_alive))
        held = 0
        try:
            async for text in self.body_iterator:
                assert isinstance(text, str)
                self._held.append(text)
                held += len(text)
                if held > MAX_HELD_CHARACTERS:
                    held = 0
                    await self.flush()
                    await asyncio.sleep(0)  # a stream that always has events ready must not block other requests
        finally:
            if kept is not None:
                kept.cancel()
        await self.flush()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def flush(self) -> None:
        """Write the held events."""
        if self._held and self._send is not None:
            body = "".join(self._held).encode()
            self._held.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._written = time.monotonic()

    async def _keep(self, keep_alive: KeepAlive) -> None:
        """Write the held events, or else a keep-alive, after each `seconds` in which nothing was written."""
        while True:
            left = self._written + keep_alive.seconds - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            if not self._held:
                self._held.append(keep_alive.text())
            await self.flush()


async def unless_gone(request: Request, work: Awaitable[Outcome]) -> Outcome | None:
    """Return the result of `work`, or None if the client disconnects first."""
    working = asyncio.ensure_future(work)
    try:
        return working.result() if await stays(request, working) else None
    finally:
        working.cancel()


async def stays(request: Request, work: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait for `work`, at most `seconds`; return False if the client disconnects first. The work is not cancelled."""
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, watching}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or not watching.done()
    finally:
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

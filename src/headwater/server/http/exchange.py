"""The generations of one API request: their events come from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from headwater.events import Event, FailedEvent, FinishedEvent, PromptEvent, TokenEvent
from headwater.request import Generation

Progress = PromptEvent | TokenEvent | FinishedEvent
Events = AsyncIterator[tuple[int, Progress]]


class Submits(Protocol):
    """What an exchange needs of an engine."""

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...


class Exchange:
    """Submits generations, numbered from 0, and yields their events in the order in which the engine made them."""

    def __init__(self, engine: Submits) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Event]] = deque()
        self._awake = asyncio.Event()
        self._waking = False  # the loop was asked to wake us, and has not yet: one call for all that arrives till then
        self.before_waiting: Callable[[], Awaitable[None]] | None = None  # called when all that arrived is taken
        self._open: dict[int, int] = {}  # number of a generation that has not ended -> the engine's id

    def submit_all(self, generations: list[Generation]) -> None:
        """Submit all or none; raises what the engine raises."""
        try:
            for number, generation in enumerate(generations):
                self._open[number] = self._engine.submit(generation, self._receiver(number))
        except Exception:
            self.cancel()
            raise

    async def events(self) -> Events:
        """(number, event) until all generations ended; raises the error of one that failed."""
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
        """Give up what has not ended. Harmless at any time."""
        for request_id in self._open.values():
            self._engine.cancel(request_id)
        self._open.clear()

    async def _wait(self) -> None:
        if self.before_waiting is not None:
            await self.before_waiting()
        while not self._arrived:  # a call may come late, for what was taken already
            self._awake.clear()
            await self._awake.wait()

    def _receiver(self, number: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            self._arrived.append((number, event))
            if not self._waking:
                self._waking = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                    self._loop.call_soon_threadsafe(self._wake)

        return on_event

    def _wake(self) -> None:
        self._waking = False
        self._awake.set()

"""The generations of one API request: their events come from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headwater.types import Event, FailedEvent, FinishedEvent, Generation, TokenEvent

Progress = TokenEvent | FinishedEvent
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
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
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
            number, event = await self._events.get()
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

    def _receiver(self, number: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        return on_event

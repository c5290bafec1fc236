"""The last quarter of an hour, second by second: memory by use, hits, queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.concurrency import run_in_threadpool

from headwater.engine.stats import EngineStats
from headwater.server.observe.recent import Recent

KEPT = 900  # samples
INTERVAL = 1.0  # seconds between two of them
COLUMNS = (
    "serial",
    "time",
    "kv",
    "checkpoint",
    "private",
    "slot",
    "segment",
    "free",
    "dead_kv_tokens",
    "running",
    "waiting",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
)

log = logging.getLogger("headwater.server")

Sample = tuple[float, ...]  # in the order of COLUMNS; pages, tokens and requests


class Timeline:
    """A ring of samples. Token counts run from the start; all else is of the moment."""

    def __init__(self, stats: Callable[[], EngineStats], recent: Recent) -> None:
        self._stats, self._recent = stats, recent
        self._ring: deque[Sample] = deque(maxlen=KEPT)
        self._serial = 0

    def since(self, serial: int) -> list[Sample]:
        """Samples after the one with that serial, oldest first."""
        return [sample for sample in self._ring if sample[0] > serial]

    async def sample(self) -> None:
        """Take one. The engine is asked on another thread: it may be in the middle of planning a step."""
        stats = await run_in_threadpool(self._stats)
        pages, recent = stats.cache.pages_by_use(), self._recent
        self._serial += 1
        self._ring.append(
            (
                self._serial,
                round(time.time(), 3),
                *pages.values(),
                stats.cache.dead_kv_tokens,
                stats.running,
                stats.waiting,
                recent.prompt_tokens,
                recent.cached_tokens,
                recent.output_tokens,
            )
        )

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Take one a second until the block ends."""
        task = asyncio.create_task(self._sample_on())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sample_on(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception:  # a page without its newest second is better than one that stands still
                log.exception("no sample was taken")
            await asyncio.sleep(INTERVAL)

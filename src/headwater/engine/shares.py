"""Shares of several engines in one memory, which follow use.

Every second an engine that evicts gets up to a sixteenth of the memory. It comes from one that evicts nothing, from
that with the longest idle time first: free pages, and cached ones of an engine that was idle for IDLE_SECONDS. If both
evict, memory moves only from an engine above its equal share to one below it. Each keeps half of its equal share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from headwater.engine.engine import Engine
from headwater.threads import run_again

LOOK_SECONDS = 1.0  # between looks at evictions
IDLE_SECONDS = 10.0  # after which cached content may be evicted for another engine
MOVED_SHARE = 1 / 16  # of the memory, at most, at one look


class Shares:
    """Thread that moves memory between engines. The sum of their pools never exceeds what it is at the start."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """The pools have equal shares, of bytes, at the start."""
        self._engines = engines
        self._even = {engine: self._size(engine) for engine in engines}
        self._step = int(sum(self._even.values()) * MOVED_SHARE)
        self._seen = {engine: 0 for engine in engines}  # evictions until the last look
        self._left = 0  # bytes that fill no page of the engine that got the others
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-shares", daemon=True)
        self.start, self.idle_seconds = self._thread.start, IDLE_SECONDS

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        run_again(self._look_on, self._ended.is_set)

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.balance()

    def balance(self) -> None:
        """Move memory to the engines that have evicted since the last call."""
        evicting = {engine for engine in self._engines if self._evictions(engine) > self._seen[engine]}
        for engine in sorted(evicting, key=lambda one: self._size(one) / self._even[one]):
            if engine.scheduler.cache.pool.n_lent:
                self._give(engine, evicting)
        self._seen = {engine: self._evictions(engine) for engine in self._engines}

    def _give(self, needy: Engine, evicting: set[Engine]) -> None:
        others = [engine for engine in self._engines if engine is not needy]
        for other in sorted(others, key=lambda one: -one.loop.idle_seconds):
            is_owed = self._size(needy) < self._even[needy] and self._size(other) > self._even[other]
            if other in evicting and not is_owed:
                continue
            evicts = is_owed or other.loop.idle_seconds >= self.idle_seconds
            above = self._size(other) - self._even[other] if is_owed else self._step
            min_pages = self._even[other] // 2 // other.spec.page_bytes
            lent = other.lend(min(self._step, above), min_pages, evicts)
            if lent:
                self._left += lent
                self._left -= needy.borrow(self._left)
                return

    @staticmethod
    def _size(engine: Engine) -> int:
        return engine.scheduler.cache.pool.size * engine.spec.page_bytes

    @staticmethod
    def _evictions(engine: Engine) -> int:
        return sum(engine.stats().cache.evictions_by_kind().values())

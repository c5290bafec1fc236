"""Copies of what is cached to stores: a queue, and the thread that makes them one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.cache.segments.store import SegmentKey
from headwater.engine.tiers.tier import NamedPart, Tier
from headwater.engine.workers import Workers
from headwater.schedule.scheduler import Scheduler
from headwater.tiers.changes import Change, PrefixStored, SegmentsStored
from headwater.tiers.store import StoreError, StoreFull

MOST_QUEUED = 256  # copies
MOST_HELD = 1 / 8  # of the pages, by copies that wait; pages of a shared prefix count for each

log = logging.getLogger("headwater.engine")


@dataclass(frozen=True, slots=True)
class Copy:
    """Parts of a prefix, or of segments, to be stored. Their pages stay as they are until `release` is called."""

    pages: int
    parts: Callable[[], list[NamedPart]]
    release: Callable[[], None]
    prefix: tuple[str, bytes] | None = None  # namespace and key
    segments: Sequence[SegmentKey] = ()

    def stored(self, names: Sequence[str]) -> Change:
        """Return the change of a store that has the parts, whose names these are."""
        return SegmentsStored(names, self.segments) if self.prefix is None else PrefixStored(*self.prefix, names)


class Copies:
    """Copies to an engine's stores. Methods without another word are called with the engine's lock held."""

    def __init__(self, stores: Sequence[Tier], scheduler: Scheduler, changed: threading.Condition) -> None:
        """`changed`: the engine's lock."""
        self._stores, self._scheduler, self._changed = stores, scheduler, changed
        self._queue: deque[Copy] = deque()
        self._making: Copy | None = None
        self._closing = False
        self.dropped = 0  # copies that were given up
        self.writer = Workers(1, "headwater-tier-writer")
        self.writer.submit(self._write)

    @property
    def queued(self) -> int:
        """Number of copies that wait."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """True if a copy waits or is being made."""
        return bool(self._queue or self._making)

    def may_add(self) -> bool:
        """Return whether one more copy can wait. If not, it counts as dropped."""
        if not self._stores:
            return False
        held_pages = sum(copy.pages for copy in self._queue)
        if len(self._queue) < MOST_QUEUED and held_pages <= MOST_HELD * self._scheduler.layout.n_pages:
            return True
        self.dropped += 1
        return False

    def add(self, copy: Copy) -> None:
        self._queue.append(copy)
        self._changed.notify_all()

    def drop_queued(self) -> None:
        """Give up the copies that wait."""
        while self._queue:
            self._queue.popleft().release()
            self.dropped += 1

    def close(self) -> None:
        """Make no more copies, and give up the one that is being made between two parts."""
        self._closing = True
        self._changed.notify_all()

    # -- on the writer's thread

    def _write(self) -> None:
        """Make copies until the end."""
        for tier in self._stores:
            try:
                tier.look()
            except StoreError as error:
                tier.failed(error)
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                self._making = copy = self._queue.popleft()
            try:
                self._store(copy)
            except Exception:
                log.exception("a copy failed")
            with self._changed:
                self._making = None
                copy.release()
                self._scheduler.room_was_made()
                self._changed.notify_all()

    def _store(self, copy: Copy) -> None:
        """Store parts in every tier."""
        parts = copy.parts()
        for tier in self._stores:
            if not tier.writable:
                self.dropped += 1
                continue
            try:
                tier.put(parts, lambda: self._closing)
                if not self._closing:
                    tier.changes.put(copy.stored([name for name, _ in parts]))
            except StoreFull as error:
                tier.counts["full"] += 1
                self.dropped += 1
                log.warning("%s", error)
            except StoreError as error:
                tier.failed_to_write(error)

"""Copies of cached checkpoints and segments to stores: a queue, and the thread that stores them one by one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from headwater.cache.segments.compose import is_marked
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.engine.tiers.prefix import PrefixParts
from headwater.engine.tiers.segments import SegmentIO
from headwater.engine.tiers.tier import NamedPart, Tier, Workers
from headwater.plan import Tail
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tiers import Copies
from headwater.tiers.changes import Change, PrefixStored, SegmentsStored
from headwater.tiers.store import StoreError, StoreFull

MAX_QUEUED_COPIES = 256
MAX_HELD_SHARE = 1 / 8  # of all pages, by queued copies; pages of a shared prefix count once for each copy

log = logging.getLogger("headwater.engine")


@dataclass(frozen=True, slots=True)
class Copy:
    """Parts of a prefix, or of segments, to be stored. Their pages do not change until `release` is called."""

    pages: int
    parts: Callable[[], list[NamedPart]]
    release: Callable[[], None]
    prefix: tuple[str, bytes] | None = None  # namespace and key
    segments: Sequence[SegmentKey] = ()

    def stored(self, names: Sequence[str]) -> Change:
        """Return the change of a store that now has parts of these names."""
        return SegmentsStored(names, self.segments) if self.prefix is None else PrefixStored(*self.prefix, names)


class StoreCopies(Copies):
    """Copies to an engine's stores. Methods are called with the engine's lock held, unless stated otherwise."""

    def __init__(
        self,
        stores: Sequence[Tier],
        scheduler: Scheduler,
        changed: threading.Condition,
        prefixes: PrefixParts,
        segments: SegmentIO,
        through: bool,
    ) -> None:
        """`changed`: the engine's lock. `through`: copy content once it is published, not once it is hit."""
        self._stores, self._scheduler, self._changed = stores, scheduler, changed
        self._prefixes, self._segments, self.through = prefixes, segments, through
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

    def saved(self, namespace: str, key: bytes, positions: Sequence[int], tails: Sequence[Tail] = ()) -> None:
        if self.through:
            for at in set(positions) - {tail.start for tail in tails}:
                self.add_prefix(namespace, key, at)
            token_bytes = self._scheduler.cache.tails.token_bytes
            for tail in tails:
                self.add_prefix(namespace, key[: tail.end * token_bytes], tail.start)

    def resumed(self, namespace: str, key: bytes, at: int) -> None:
        self.add_prefix(namespace, key, at)  # even with write-through: an earlier copy may be evicted

    def built(self, segments: Sequence[StoredSegment]) -> None:
        if self.through:
            self.reused(segments)

    def may_add(self) -> bool:
        """Return whether another copy can be queued. If not, it counts as dropped."""
        if not self._stores:
            return False
        held_pages = sum(copy.pages for copy in self._queue)
        if len(self._queue) < MAX_QUEUED_COPIES and held_pages <= MAX_HELD_SHARE * self._scheduler.layout.n_pages:
            return True
        self.dropped += 1
        return False

    def add_prefix(self, namespace: str, key: bytes, at: int) -> None:
        """Queue a copy of a cached checkpoint, and of the tail after it that has most tokens of the key.

        Their pages are held until they are stored. An approximate prefix is not copied.
        """
        layout, cache = self._scheduler.layout, self._scheduler.cache
        prefix = key[: at // layout.unit_tokens * layout.unit_bytes]
        if is_marked(prefix) or not self.may_add():
            return
        id = self._scheduler.new_id()
        held = cache.hold(id, namespace, key, at)
        if held is not None:
            parts = partial(self._prefixes.parts, namespace, prefix, at, held)
            of_tails = sum(len(tail.kv) + len(tail.rows) for tail in held.tails)
            pages = len(held.table) + len(held.state) + of_tails
            self._add(Copy(pages, parts, partial(cache.release, id), (namespace, prefix)))

    def reused(self, segments: Sequence[StoredSegment]) -> None:
        """Queue a copy of segments, and pin them until it is stored."""
        if not self.may_add():
            return
        for stored in segments:
            self._scheduler.cache.segments.pin(stored)
        pages, keys = sum(stored.pages for stored in segments), [stored.key for stored in segments]
        parts = partial(self._segments.parts, segments)
        self._add(Copy(pages, parts, partial(self._unpin, segments), segments=keys))

    def _unpin(self, segments: Sequence[StoredSegment]) -> None:
        for stored in segments:
            self._scheduler.cache.segments.unpin(stored)

    def _add(self, copy: Copy) -> None:
        self._queue.append(copy)
        self._changed.notify_all()

    def uncopied(self) -> Iterator[Callable[[], None]]:
        """Yield calls that queue a copy of each cached segment, the last used first, then of each checkpoint."""
        if not self._stores:
            return
        cache = self._scheduler.cache
        ready = [stored for stored in cache.segments if stored.ready]
        for stored in sorted(ready, key=lambda stored: stored.used, reverse=True):
            yield partial(self.reused, (stored,))
        for checkpoint in cache.checkpoints():
            yield partial(self.add_prefix, *checkpoint)

    def drop_queued(self) -> None:
        """Give up the copies that wait."""
        while self._queue:
            self._queue.popleft().release()
            self.dropped += 1

    def close(self) -> None:
        """Start no more copies, and stop the current one between two parts."""
        self._closing = True
        self._changed.notify_all()

    # -- on the writer's thread

    def _write(self) -> None:
        """Store queued copies until the engine closes."""
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

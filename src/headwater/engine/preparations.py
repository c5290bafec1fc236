"""Segments that are wanted in memory before requests are composed of them: by a client, or by a cluster's routers."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from headwater.cache.segments.store import SegmentKey
from headwater.errors import EngineStopped
from headwater.schedule.scheduler import Scheduler

Outcome = Literal["stored", "held", "too_short", "no_memory"]  # of a warmed segment; held: it was stored before
POLL_SECONDS = 0.02  # between looks at segments that are built


@dataclass(frozen=True)
class Warming:
    """Requests of one client to build segments. The caller holds the lock of `changed`; waiting releases it."""

    scheduler: Scheduler
    changed: threading.Condition
    is_ending: Callable[[], bool]

    def warm(self, segments: Iterable[tuple[int, ...]], namespace: str) -> list[Outcome]:
        """Build segments of these token ids and wait for them; return the outcome of each, in their order.

        Raises ConfigError if segments are not stored, EngineStopped.
        """
        keys = [self.scheduler.composer.wanted(ids, namespace) for ids in segments]
        held = {key for key in keys if key is not None and self._is_ready(key)}
        asked = dict.fromkeys(key for key in keys if key is not None and key not in held)
        self.scheduler.wanted.extend(asked)
        self.changed.notify_all()
        while any(self._is_open(key) for key in asked):
            if self.is_ending():
                raise EngineStopped("the engine was stopped before all segments were stored")
            self.changed.wait(POLL_SECONDS)
        return [self._outcome(key, held) for key in keys]

    def _outcome(self, key: SegmentKey | None, held: set[SegmentKey]) -> Outcome:
        if key is None:
            return "too_short"
        if key in held:
            return "held"
        return "stored" if self._is_ready(key) else "no_memory"

    def _is_ready(self, key: SegmentKey) -> bool:
        found = self.scheduler.composer.find(key)
        return found is not None and found.ready

    def _is_open(self, key: SegmentKey) -> bool:
        """Return whether the segment waits to be built, or is being built."""
        found = self.scheduler.composer.find(key)
        return key in self.scheduler.wanted or (found is not None and not found.ready)


class Preparations:
    """Segments that are wanted, in the order in which routers named them, and whom to tell once each is there."""

    def __init__(self, scheduler: Scheduler, changed: threading.Condition, vocab_size: int) -> None:
        """`changed`: the engine's lock."""
        self._scheduler, self._changed, self._vocab_size = scheduler, changed, vocab_size
        self._open: dict[SegmentKey, dict[int, Callable[[bool], None]]] = {}
        self._numbers = count()

    def prepare(self, segment: bytes, peers: Sequence[bytes], done: Callable[[bool], None]) -> Callable[[], None]:
        """Load or build a segment, then call `done`: False if memory is short. Returns a function that cancels it.

        `segment`: its encoded key. `peers`: incarnations of workers that have it, from which it is pulled if that takes
        less time than computing it. `done` may be called before this returns, and is called on the engine's thread
        otherwise. Any thread may call this. Raises ValueError or struct.error for a key of another model,
        RequestTooLarge for a segment longer than a prompt may be, ConfigError where no segments are stored.
        """
        key, number = SegmentKey.decoded(segment), next(self._numbers)
        self._scheduler.composer.wanted((), key.namespace)
        self._check(key)
        with self._changed:
            stored = self._scheduler.composer.find(key)
            is_ready = stored is not None and stored.ready
            if stored is not None and is_ready:
                self._scheduler.cache.expect_segment(stored)
            else:
                self._scheduler.tiers.peers.name_holders(key, peers)
                if key not in self._scheduler.wanted:
                    self._scheduler.wanted.append(key)
                self._open.setdefault(key, {})[number] = done
                self._changed.notify_all()
        if is_ready:
            done(True)
        return lambda: self._cancel(key, number)

    def _check(self, key: SegmentKey) -> None:
        """Raise ValueError or RequestTooLarge for a segment that cannot be built."""
        ends = key.widths.head + key.widths.tail
        if key.tokens <= ends:
            raise ValueError(f"a segment has {key.tokens:,} tokens, its ends have {ends:,}")
        largest = max(array("I", key.ids))  # a negative one is larger than any vocabulary
        if largest >= self._vocab_size:
            raise ValueError(f"token {largest:,} is beyond the vocabulary of {self._vocab_size:,}")
        self._scheduler.check_fits(key.tokens)

    def _cancel(self, key: SegmentKey, number: int) -> None:
        """Want a segment no more, unless others do. One that is being built or loaded is built to its end."""
        with self._changed:
            waiting = self._open.get(key, {})
            waiting.pop(number, None)
            if not waiting and self._open.pop(key, None) is not None and key in self._scheduler.wanted:
                self._scheduler.wanted.remove(key)

    def after(self, stepped: Callable[[], None]) -> Callable[[], None]:
        """Return a function for the engine to call after each change: it calls `stepped`, then tells who waits."""

        def look() -> None:
            stepped()
            for key in [key for key in self._open if not self._is_pending(key)]:
                stored = self._scheduler.composer.find(key)
                for done in self._open.pop(key).values():
                    done(stored is not None)

        return look

    def _is_pending(self, key: SegmentKey) -> bool:
        stored = self._scheduler.composer.find(key)
        return not stored.ready if stored is not None else key in self._scheduler.wanted

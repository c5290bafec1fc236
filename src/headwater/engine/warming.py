"""Warming: segments that are stored before a prompt has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from headwater.cache.segments.store import SegmentKey
from headwater.errors import EngineStopped
from headwater.schedule.scheduler import Scheduler

Outcome = Literal["stored", "held", "too_short", "no_memory"]  # held: it was stored before
LOOKED_EVERY = 0.02  # seconds


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
        for key in asked:
            self.scheduler.wanted.append(key)
        self.changed.notify_all()
        while any(self._is_open(key) for key in asked):
            if self.is_ending():
                raise EngineStopped("the engine was stopped before all segments were stored")
            self.changed.wait(LOOKED_EVERY)
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

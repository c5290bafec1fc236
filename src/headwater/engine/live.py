"""Requests with a client: their text, sampling and warmed segments, and the observer of complete answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from headwater.cache.segments.store import SegmentKey
from headwater.engine.detokenizer import TextStream
from headwater.engine.sampler import PromptScores, Sampling
from headwater.errors import EngineStopped
from headwater.events import Event
from headwater.request import SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler

OnEvent = Callable[[Event], None]
Outcome = Literal["stored", "held", "too_short", "no_memory"]  # of a warmed segment; held: it was stored before
LOOKED_EVERY = 0.02  # seconds


@dataclass(eq=False)
class Live:
    """State that the engine keeps of a request, in addition to the scheduler's sequence."""

    seq: Request
    on_event: OnEvent
    text: TextStream
    sampling: Sampling
    submitted: float  # seconds of a monotonic clock
    started: float | None = None  # when its first leg ran
    cached: int | None = None  # leading tokens of the prompt that were cached then; None: segments, or scored
    scores: PromptScores | None = None  # until they are sent
    drafted: int = 0  # tokens of the drafts that steps verified
    accepted: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.seq.generation.params


class Observer(Protocol):
    """Listener to complete answers, called on the engine's thread; `close` follows when the engine stops."""

    def completed(self, seq: Request) -> None: ...

    def close(self) -> None: ...


class NoObserver:
    """Observer that does nothing."""

    def completed(self, seq: Request) -> None:
        """Ignore the answer."""

    def close(self) -> None:
        """Nothing is open."""


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

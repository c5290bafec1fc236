"""Counts what the engine did, and tells from it when a refused client should come back."""

from __future__ import annotations

import math

from headwater.engine.stats import EngineStats
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Purpose

RECENT = 20  # requests whose durations make the estimate
MOST_SECONDS = 60  # that a client is told to wait


class Meter:
    """Counters since the engine's start."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.step_seconds = 0.0
        self.refused = 0
        self.expired = 0
        self._mean_seconds = 1.0  # that a request took of late, from its submission to its end

    def ended(self, seconds: float) -> None:
        """A request ended, so long after its submission."""
        self._mean_seconds += (seconds - self._mean_seconds) / RECENT

    def retry_after(self, waiting: int, at_once: int) -> int:
        """Seconds until as many as wait now have probably had their turn."""
        return max(1, math.ceil(min(MOST_SECONDS, waiting * self._mean_seconds / at_once)))

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """All that is held and has been done, as of now."""
        computed = scheduler.computed
        return EngineStats(
            cache=scheduler.cache.stats(),
            running=scheduler.computing,
            waiting=len(scheduler.waiting),
            answers_waiting=len(scheduler.answers),
            preemptions=scheduler.preemptions,
            steps=self.steps,
            failed_steps=self.failed_steps,
            step_seconds=self.step_seconds,
            prefill_tokens=computed[Purpose.PROMPT],
            answer_tokens=computed[Purpose.ANSWER],
            segment_tokens=computed[Purpose.SEGMENT],
            healing_tokens=computed[Purpose.HEALING],
            decode_tokens=computed[Purpose.DECODE],
            healings_waiting=len(scheduler.healer.queue),
            healed=scheduler.healer.healed,
            healings_superseded=scheduler.healer.superseded,
            healings_given_up=scheduler.healer.given_up,
            refused=self.refused,
            expired=self.expired,
        )

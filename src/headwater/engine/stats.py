"""Counts of the engine's memory and completed work, for /metrics, /cache and the live page."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges are of now; counters run from the engine's start."""

    cache: CacheStats
    running: int
    waiting: int
    answers_waiting: int  # finished answers whose prefill has not begun
    preemptions: int
    steps: int
    failed_steps: int
    step_seconds: float  # spent in the executor, all steps together
    prefill_tokens: int  # computed in legs of requests
    answer_tokens: int  # computed in legs of finished answers, so that they can be resumed
    segment_tokens: int  # computed so that segments can be composed
    healing_tokens: int  # computed so that sessions with composed prefixes can go on exactly
    decode_tokens: int  # rows of decoding requests
    healings_waiting: int  # composed prefixes that are to be made exact
    healed: int  # composed prefixes that are exact now
    healings_superseded: int  # not made exact by themselves, as their sessions went on
    healings_given_up: int  # for want of memory
    refused: int  # by QueueFull
    expired: int  # by DeadlineExceeded

    def healings_by_outcome(self) -> dict[str, int]:
        return {"healed": self.healed, "superseded": self.healings_superseded, "given_up": self.healings_given_up}

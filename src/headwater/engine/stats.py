"""What the engine holds and has done, for /metrics, /cache and the live page."""

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
    decode_tokens: int  # rows of decoding requests
    refused: int  # by QueueFull
    expired: int  # by DeadlineExceeded

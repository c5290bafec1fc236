"""Gauges and counters of the engine, for /metrics, /cache and the live page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headwater.cache.stats import CacheStats
from headwater.plan import PrefillFlops
from headwater.schedule.prefill_seconds import PrefillSeconds, PrefillSpeed
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase, Purpose
from headwater.schedule.step import Step
from headwater.schedule.tier_load import ReadSpeed, TierStats
from headwater.threads import restarts

FORGETS = 0.9  # weight of earlier terms of a ratio with each new one
PROBED = 192  # tokens of the prefill that is measured before any request comes
RECENT = 20  # requests whose durations make the estimate
MAX_RETRY_SECONDS = 60  # that a client is advised to wait


class Ratio:
    """A quotient of sums in which recent terms weigh more."""

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def note(self, above: float, below: float) -> None:
        """Add a term."""
        self._above = FORGETS * self._above + above
        self._below = FORGETS * self._below + below

    @property
    def value(self) -> float | None:
        """The quotient; None before any term."""
        return self._above / self._below if self._below else None


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait for an engine, and how fast it computes."""

    running: int  # requests
    waiting: int
    queued_tokens: int  # of prompts that are not computed yet, without cached prefixes
    prefill: PrefillSpeed | None  # as measured; None before any prompt was computed
    request_seconds: float  # mean of recent requests, from submission to end
    held_tokens: int = 0  # of all these requests, prompts and answers so far
    memory_tokens: int = 0  # whose KV fits into the whole memory; 0 for a model without KV
    pull: ReadSpeed | None = None  # from other workers of a cluster; None: it pulls nothing
    loads: dict[str, ReadSpeed] = field(default_factory=dict)  # from its own tiers, by medium


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
    answer_tokens: int  # computed in legs of finished answers
    segment_tokens: int  # computed in builds of segments
    healing_tokens: int  # recomputed for sessions with composed prefixes
    decode_tokens: int  # rows of decoding requests
    healings_waiting: int  # composed prefixes that wait for exact recomputation
    healed: int  # composed prefixes that were recomputed exactly
    healings_superseded: int  # composed prefixes whose sessions continued: the longer one is healed
    healings_given_up: int  # for want of memory
    refused: int  # by QueueFull
    expired: int  # by DeadlineExceeded
    accepted_drafts: int  # tokens
    rejected_drafts: int
    loaded_tokens: int  # that were read from tiers
    loaded_segments: int
    copies_dropped: int  # copies to tiers that were given up
    thread_restarts: int  # of this process's threads, after errors
    tiers: tuple[TierStats, ...] = ()

    def drafts_by_outcome(self) -> dict[str, int]:
        return {"accepted": self.accepted_drafts, "rejected": self.rejected_drafts}

    def healings_by_outcome(self) -> dict[str, int]:
        return {"healed": self.healed, "superseded": self.healings_superseded, "given_up": self.healings_given_up}


class Meter:
    """Counters since the engine's start."""

    def __init__(self, flops: PrefillFlops) -> None:
        """`flops`: of the model."""
        self.steps = 0
        self.failed_steps = 0
        self.step_seconds = 0.0
        self.refused = 0
        self.expired = 0
        self._mean_seconds = 1.0  # of recent requests, from submission to end
        self._flops, self._prefill = flops, PrefillSeconds(flops)
        self.by_tokens = PrefillSeconds()  # the same, as if all tokens took the same time: for tiers

    def ended(self, seconds: float) -> None:
        """Note a request that ended `seconds` after its submission."""
        self._mean_seconds += (seconds - self._mean_seconds) / RECENT

    def probed(self, seconds: float) -> None:
        """Note the seconds of a prefill of `PROBED` tokens: until a long prompt comes, they say what a token takes."""
        self._prefill.note(self._flops.between(0, PROBED), seconds)
        self.by_tokens.note(PROBED, seconds)

    def prefilled(self, step: Step, seconds: float) -> None:
        """Note the seconds of a step, if it computed a part of a prompt."""
        if tokens := sum(leg.plan.computed_tokens for leg in step.legs):
            self._prefill.note(step.prefill_flops(self._flops), seconds)
            self.by_tokens.note(tokens, seconds)

    def backlog(self, scheduler: Scheduler) -> Backlog:
        """Return what waits for the scheduler."""
        waiting, layout, figures = scheduler.waiting, scheduler.layout, scheduler.tiers.figures()
        queued = sum(seq.n_prompt - (seq.match.resumed_tokens if seq.match else 0) for seq in waiting)
        prefills = (seq for seq in scheduler.running.values() if seq.phase is Phase.PREFILL)
        queued += sum(seq.n_prompt - seq.computed for seq in prefills)
        queued += sum(key.tokens for key in scheduler.wanted)
        return Backlog(
            running=scheduler.computing,
            waiting=len(waiting),
            queued_tokens=queued,
            prefill=self._prefill.speed,
            request_seconds=self._mean_seconds,
            held_tokens=sum(len(seq.tokens) for part in (waiting, scheduler.running.values()) for seq in part),
            memory_tokens=layout.n_pages * layout.page_size * layout.kv_pages_per_unit,
            pull=figures.pull,
            loads=figures.loads,
        )

    def retry_after(self, waiting: int, at_once: int) -> int:
        """Estimate the seconds until all requests that wait now have begun."""
        return max(1, math.ceil(min(MAX_RETRY_SECONDS, waiting * self._mean_seconds / at_once)))

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """Return all gauges and counters."""
        computed, figures = scheduler.computed, scheduler.tiers.figures()
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
            accepted_drafts=scheduler.speculation.accepted,
            rejected_drafts=scheduler.speculation.rejected,
            loaded_tokens=figures.loaded_tokens,
            loaded_segments=figures.loaded_segments,
            copies_dropped=figures.copies_dropped,
            thread_restarts=restarts.total(),
            tiers=figures.tiers,
        )

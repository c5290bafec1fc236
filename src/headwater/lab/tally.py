"""Outcomes of the requests of one row, counted as they happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.cache.history import Edges
from headwater.plan import Plan, PrefillFlops
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.step import Step
from headwater.traces.request import Request, Trace


class Ideal:
    """Sees requests in the order in which they come."""

    def __init__(self, trace: Trace, unit_tokens: int) -> None:
        self._trace, self._unit = trace, unit_tokens
        self._width = unit_tokens // trace.block_tokens * trace.element_bytes
        self._edges = Edges(self._width)

    def hit(self, request: Request) -> int:
        """Tokens at which this request would resume; what it computes is there from now on."""
        key = self._trace.key(request, request.known_tokens)
        cap = min(max(0, request.prompt_tokens - 1) // self._unit, len(key) // self._width)
        return min(cap, self._edges.note(request.namespace, key, len(key) // self._width)) * self._unit


@dataclass(frozen=True, slots=True)
class Saved:
    """What one request owes to segments."""

    seam_tokens: int = 0  # of them, what was computed anew
    flops: float = 0.0  # of their interiors, where they stood


@dataclass(slots=True)
class SegmentWork:
    """Sums over all steps so far. FLOPs are a plain prefill's: what transitions and composing add is left out."""

    flops: PrefillFlops
    made_tokens: int = 0
    made_flops: float = 0.0
    _saved: dict[int, Saved] = field(default_factory=dict)

    def note(self, step: Step) -> None:
        """Call between a step's plan and its end."""
        for leg in step.legs:
            plan, seq = leg.plan, leg.seq
            if plan.build is not None:
                self.made_tokens += plan.computed_tokens
                self.made_flops += self.flops.between(plan.start, plan.end)
            elif plan.composed and isinstance(seq, Answered) and seq.composition is not None:
                tokens = sum(span.end - span.start for span in seq.composition.spans)
                self._saved[seq.id] = Saved(tokens - seq.composition.interiors, self._composed(plan))

    def of(self, request: int) -> Saved:
        """Of a request whose prompt is computed; it is asked once."""
        return self._saved.pop(request, Saved())

    def _composed(self, plan: Plan) -> float:
        return sum(self.flops.between(part.at + part.start, part.at + part.end) for part in plan.composed)


SAMPLES = 240  # of what the memory holds, over a run
NOTHING = Saved()
TOO_LARGE = "too_large"  # in the place of a reason: no amount of waiting could have served it


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: tokens, seconds."""

    number: int  # in the order in which requests came
    session: str
    prompt_tokens: int
    output_tokens: int
    resumed_at: int
    stranded_tokens: int
    reason: str
    ideal: int  # where it would have resumed with endless memory and a checkpoint at every unit
    ttft: float | None = None
    at: float = 0.0
    composed_tokens: int = 0
    seam_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed for it."""
        return self.resumed_at + self.composed_tokens

    def as_dict(self) -> dict[str, object]:
        ttft = None if self.ttft is None else round(self.ttft * 1000, 3)
        return {
            "request": self.number,
            "session": self.session,
            "at": round(self.at, 3),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "hit_tokens": self.hit_tokens,
            "resumed_at": self.resumed_at,
            "composed_tokens": self.composed_tokens,
            "seam_tokens": self.seam_tokens,
            "stranded_tokens": self.stranded_tokens,
            "reason": self.reason,
            "ideal_tokens": self.ideal,
            "ttft_ms": ttft,
        }


@dataclass(frozen=True, slots=True)
class Held:
    """What the memory held after so many requests, in pages."""

    requests: int
    kv: int
    checkpoints: int
    stranded: int  # KV that no checkpoint can use
    private: int
    free: int
    segments: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over all requests so far, and what the memory held on the way."""

    flops: PrefillFlops
    expected: int  # requests, as far as known: samples of memory are spread over them
    work: SegmentWork
    outcomes: list[Outcome] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    prefix_tokens: int = 0  # at which requests resumed
    composed_tokens: int = 0
    seam_tokens: int = 0
    ideal_tokens: int = 0
    stranded_tokens: int = 0
    flops_all: float = 0.0
    _flops_spared: float = 0.0

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed, less those that were to make segments."""
        return self.prefix_tokens + self.composed_tokens - self.work.made_tokens

    @property
    def flops_saved(self) -> float:
        return self._flops_spared - self.work.made_flops

    def add(
        self,
        request: Request,
        account: CacheAccount | None,
        ideal: int,
        at: float,
        ttft: float | None = None,
        saved: Saved = NOTHING,
    ) -> None:
        """A request's prompt was computed; without an account it was refused."""
        composed = 0 if account is None else account.composed_tokens
        if not composed:
            saved = NOTHING
        hit = 0 if account is None else account.resumed_at
        stranded = 0 if account is None else account.stranded_tokens
        reason = TOO_LARGE if account is None else str(account.reason)
        self.outcomes.append(
            Outcome(
                len(self.outcomes),
                request.session,
                request.prompt_tokens,
                request.output_tokens,
                hit,
                stranded,
                reason,
                ideal,
                ttft,
                at,
                composed,
                saved.seam_tokens,
            )
        )
        self.reasons[reason] += 1
        self.prompt_tokens += request.prompt_tokens
        self.prefix_tokens += hit
        self.composed_tokens += composed
        self.seam_tokens += saved.seam_tokens
        self.ideal_tokens += ideal
        self.stranded_tokens += stranded
        self.flops_all += self.flops.between(0, request.prompt_tokens)
        self._flops_spared += self.flops.between(0, hit) + saved.flops

    def sample(self, cache: PrefixCache) -> None:
        """Note what the memory holds, once in a while."""
        if len(self.outcomes) * SAMPLES < len(self.held) * self.expected:
            return
        stats = cache.stats()
        unit_pages = cache.layout.kv_pages_per_unit * cache.layout.unit_tokens // cache.layout.page_size
        dead = stats.dead_kv_tokens // cache.layout.unit_tokens * unit_pages
        self.held.append(
            Held(
                len(self.outcomes),
                stats.pages_kv - dead,
                stats.pages_checkpoint,
                dead,
                stats.pages_private + stats.pages_slot,
                stats.pages_free,
                stats.pages_segment,
            )
        )

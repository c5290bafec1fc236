"""Outcomes of the requests of one row, counted as they happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.cache.history import Edges
from headwater.plan import PrefillFlops
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.step import Step
from headwater.traces.request import Request, Trace


class Resent(NamedTuple):
    """Leading tokens of a prompt that were part of an earlier request, in its prompt or its known answer."""

    ideal: int = 0  # at which it would resume with endless memory and a checkpoint at every unit
    page_start: int = 0  # start of the page in which the prompt parts from all earlier requests
    tokens: int = 0  # position at which it parts from them; `page_start` in recorded blocks

    def recomputed(self, resumed_at: int) -> int:
        """Return the tokens of that page before the prompt parts that a request computes if it resumes there."""
        return max(0, self.tokens - max(self.page_start, resumed_at))


class Ideal:
    """Longest common prefixes of requests with earlier ones, in order of arrival."""

    def __init__(self, trace: Trace, unit_tokens: int) -> None:
        self._trace, self._unit = trace, unit_tokens
        self._edges = Edges(trace.element_bytes)

    def hit(self, request: Request) -> Resent:
        """Return the tokens of a prompt that were sent before, and add its own."""
        key, unit = self._trace.key(request, request.known_tokens), self._unit
        elements = self._edges.note(request.namespace, key, len(key) // self._trace.element_bytes)
        tokens = min(elements * self._trace.block_tokens, request.prompt_tokens)
        page_start = tokens // unit * unit
        ideal = min(page_start, max(0, request.prompt_tokens - 1) // unit * unit)
        return Resent(ideal, page_start, tokens if self._trace.block_tokens == 1 else page_start)


@dataclass(frozen=True, slots=True)
class Saved:
    """Savings of one request by segments."""

    seam_tokens: int = 0  # of the segments, recomputed
    flops: float = 0.0  # of their interiors, at their positions in the prompt


@dataclass(slots=True)
class SegmentWork:
    """Tokens and FLOPs that steps spend on segments. FLOPs are a plain prefill's, without transitions and composing."""

    flops: PrefillFlops
    made_tokens: int = 0
    made_flops: float = 0.0
    _saved: dict[int, Saved] = field(default_factory=dict)

    def note(self, step: Step) -> None:
        """Count a step; call between its plan and its end."""
        for leg in step.legs:
            plan, seq = leg.plan, leg.seq
            if plan.build is not None:
                self.made_tokens += plan.computed_tokens
                self.made_flops += self.flops.between(plan.start, plan.end)
            elif plan.composed and isinstance(seq, Answered) and seq.composition is not None:
                tokens = sum(span.end - span.start for span in seq.composition.spans)
                flops = sum(self.flops.between(part.at + part.start, part.at + part.end) for part in plan.composed)
                self._saved[seq.id] = Saved(tokens - seq.composition.interiors, flops)

    def of(self, request: int) -> Saved:
        """Return, once, the savings of a request whose prompt is computed."""
        return self._saved.pop(request, Saved())


SAMPLES = 240  # of the memory's contents over a run
NOTHING = Saved()
TOO_LARGE = "too_large"  # instead of a reason: the whole memory is too small for the request
WORKERS_LOST = "workers_lost"  # likewise: all attempts failed with their workers


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request. Tokens, seconds."""

    number: int  # in the order in which requests came
    session: str
    prompt_tokens: int
    output_tokens: int
    resumed_at: int
    stranded_tokens: int
    reason: str
    ideal: int  # `resumed_at` with endless memory and a checkpoint at every unit
    ttft: float | None = None
    at: float = 0.0
    composed_tokens: int = 0
    seam_tokens: int = 0
    priority: int = 0
    recomputed_tokens: int = 0  # below a page: see `Resent`

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
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
            "recomputed_tokens": self.recomputed_tokens,
            "ttft_ms": ttft,
        }


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of the memory after a number of requests, in pages."""

    requests: int
    kv: int
    checkpoints: int
    stranded: int  # KV that no checkpoint can use
    private: int
    free: int
    segments: int = 0
    tails: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over all requests so far, and samples of the memory's contents."""

    flops: PrefillFlops
    expected: int  # number of requests that samples of memory are spread over
    work: SegmentWork
    outcomes: list[Outcome] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    flops_all: float = 0.0
    token_seconds: list[float] = field(default_factory=list)  # of each answer, a token after its first
    added: Callable[[Request, CacheAccount | None], None] = lambda request, account: None  # called by `add`
    is_counted: Callable[[Request], bool] = lambda request: False  # at another worker
    _flops_spared: float = 0.0

    def sum(self, name: str) -> int:
        """Return the sum of a figure over all requests."""
        return sum(getattr(one, name) for one in self.outcomes)

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed, less those computed to build segments."""
        return self.sum("hit_tokens") - self.work.made_tokens

    @property
    def flops_saved(self) -> float:
        return self._flops_spared - self.work.made_flops

    def add(
        self,
        request: Request,
        account: CacheAccount | None,
        sent: Resent,
        at: float,
        ttft: float | None = None,
        saved: Saved = NOTHING,
        error: str = TOO_LARGE,
    ) -> None:
        """Count a request whose prompt was computed, or that got an error if it has no account."""
        if self.is_counted(request):
            return
        composed = 0 if account is None else account.composed_tokens
        one = Outcome(
            number=len(self.outcomes),
            session=request.session,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            resumed_at=0 if account is None else account.resumed_at,
            stranded_tokens=0 if account is None else account.stranded_tokens,
            reason=error if account is None else str(account.reason),
            ideal=sent.ideal,
            ttft=ttft,
            at=at,
            composed_tokens=composed,
            seam_tokens=saved.seam_tokens if composed else 0,
            priority=request.priority,
            recomputed_tokens=0 if account is None or composed else sent.recomputed(account.resumed_at),
        )
        self.outcomes.append(one)
        self.flops_all += self.flops.between(0, one.prompt_tokens)
        self._flops_spared += self.flops.between(0, one.resumed_at) + (saved.flops if composed else 0.0)
        self.added(request, account)

    def join(self, other: Tally) -> None:
        """Add the sums of another tally, whose outcomes are in this one's list."""
        self.work.made_tokens += other.work.made_tokens
        self.work.made_flops += other.work.made_flops
        self.flops_all += other.flops_all
        self._flops_spared += other._flops_spared

    def answered(self, tokens: int, seconds: float) -> None:
        """Count an answer, whose tokens after the first took `seconds`."""
        if tokens > 1:
            self.token_seconds.append(seconds / (tokens - 1))

    def sample(self, cache: PrefixCache) -> None:
        """Sample the memory's contents, SAMPLES times over the run."""
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
                stats.pages_tail,
            )
        )

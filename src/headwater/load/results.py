"""Results of a run: each request, and rates, times and counts over all of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.percentile import percentile

PERCENTS = (50, 90, 95, 99)
OUTCOMES = ("ok", "refused", "error", "timeout", "interrupted", "skipped")


@dataclass(frozen=True, slots=True)
class Result:
    """One request that was sent, or skipped because an earlier turn of its session has no answer.

    Times are seconds since the start of the run.
    """

    number: int
    session: str
    turn: int
    tenant: str
    outcome: str  # of OUTCOMES; refused: 429, 503 with Retry-After, or a stream that begins with such an error
    due: float  # its arrival; in a closed loop, the moment at which its client became free
    sent: float
    ended: float
    status: int | None = None
    detail: str = ""  # the error's message
    ttft: float | None = None  # from sending to the first text, reasoning or tool call
    gaps: tuple[float, ...] = ()  # between the events that carried tokens
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    reason: str | None = None  # for where the request resumed; Headwater's
    resumed_at: int | None = None

    @property
    def ttft_from_due(self) -> float | None:
        """Time from when the request was due to the first token: delaying clients gains a server nothing."""
        return None if self.ttft is None else self.ttft + self.sent - self.due

    @property
    def latency(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def token_time(self) -> float:
        """Mean seconds for each token after the first; 0 for an answer in one piece."""
        return sum(self.gaps) / max(1, len(self.gaps), (self.output_tokens or 0) - 1)

    def meets(self, slo_ttft: float, slo_itl: float) -> bool:
        """Return whether the answer is complete, and within these limits in seconds."""
        first = self.ttft_from_due
        return self.outcome == "ok" and first is not None and first <= slo_ttft and self.token_time <= slo_itl


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of seconds, or of another quantity."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Summarise the values that are not None; returns None if there are none."""
        ascending = sorted(value for value in values if value is not None)
        if not ascending:
            return None
        p50, p90, p95, p99 = (percentile(ascending, percent) for percent in PERCENTS)
        return cls(len(ascending), statistics.fmean(ascending), p50, p90, p95, p99, ascending[-1])


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that a good answer keeps."""

    ttft: float = 1.0  # from when the request was due to the first token
    itl: float = 0.1  # mean time between the answer's tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Rates are per second between the first request and the last end; times are of ok answers."""

    requests: int
    outcomes: dict[str, int]
    errors: dict[str, int]  # by message, refusals among them
    reasons: dict[str, int]  # Headwater's, for where requests resumed
    wall: float  # seconds
    requests_per_s: float  # answered
    goodput_per_s: float  # answered within the SLO
    good: int
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not report them
    output_tokens: int
    hit_rate: float | None  # cached / prompt tokens, of requests that report both
    ttft: Distribution | None
    ttft_from_due: Distribution | None
    itl: Distribution | None
    latency: Distribution | None
    sent_late: Distribution | None  # delay of the generator itself, in first turns

    @classmethod
    def of(cls, results: list[Result], slo: Slo) -> Summary:
        ok = [r for r in results if r.outcome == "ok"]
        sent = [r for r in results if r.outcome != "skipped"]
        wall = max((r.ended for r in sent), default=0.0) - min((r.sent for r in sent), default=0.0)
        good = sum(r.meets(slo.ttft, slo.itl) for r in ok)
        output = sum(r.output_tokens or 0 for r in ok)
        reported = [r for r in ok if r.cached_tokens is not None and r.prompt_tokens]
        cached = sum(r.cached_tokens or 0 for r in reported)
        of_prompts = sum(r.prompt_tokens or 0 for r in reported)

        def per_s(amount: int) -> float:
            return amount / wall if wall > 0 else 0.0

        return cls(
            requests=len(results),
            outcomes=dict(Counter(r.outcome for r in results)),
            errors=dict(Counter(r.detail for r in results if r.outcome in ("error", "refused"))),
            reasons=dict(Counter(r.reason for r in ok if r.reason is not None)),
            wall=wall,
            requests_per_s=per_s(len(ok)),
            goodput_per_s=per_s(good),
            good=good,
            output_tokens_per_s=per_s(output),
            prompt_tokens=sum(r.prompt_tokens or 0 for r in ok),
            cached_tokens=cached if reported else None,
            output_tokens=output,
            hit_rate=cached / of_prompts if reported else None,
            ttft=Distribution.of(r.ttft for r in ok),
            ttft_from_due=Distribution.of(r.ttft_from_due for r in ok),
            itl=Distribution.of(gap for r in ok for gap in r.gaps),
            latency=Distribution.of(r.latency for r in ok),
            sent_late=Distribution.of(r.sent - r.due for r in sent if r.turn == 0),
        )

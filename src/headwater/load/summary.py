"""What a run's results come to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.load.result import Result
from headwater.percentile import percentile

PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of seconds, or whatever was counted."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """None are left out; of nothing else there is no distribution."""
        ascending = sorted(value for value in values if value is not None)
        if not ascending:
            return None
        percentiles = (percentile(ascending, percent) for percent in PERCENTS)
        return cls(len(ascending), statistics.fmean(ascending), *percentiles, ascending[-1])


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds that an answer may take to be a good one."""

    ttft: float = 1.0  # from when it was due to its first token
    itl: float = 0.1  # a token after that, on the answer's average


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second from the first request sent to the last one ended. Times are of the answers that are ok."""

    requests: int
    outcomes: dict[str, int]
    errors: dict[str, int]  # by message, refusals among them
    reasons: dict[str, int]  # Headwater's: why requests resumed where they did
    wall: float  # seconds
    requests_per_s: float  # answered
    goodput_per_s: float  # answered within the SLO
    good: int
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not tell
    output_tokens: int
    hit_rate: float | None  # cached / prompt tokens, where both are told
    ttft: Distribution | None
    ttft_from_due: Distribution | None
    itl: Distribution | None
    latency: Distribution | None
    sent_late: Distribution | None  # first turns: how late the generator itself was

    @classmethod
    def of(cls, results: list[Result], slo: Slo) -> Summary:
        ok = [r for r in results if r.outcome == "ok"]
        sent = [r for r in results if r.outcome != "skipped"]
        wall = max((r.ended for r in sent), default=0.0) - min((r.sent for r in sent), default=0.0)
        good = sum(r.meets(slo.ttft, slo.itl) for r in ok)
        output = sum(r.output_tokens or 0 for r in ok)
        told = [r for r in ok if r.cached_tokens is not None and r.prompt_tokens]
        cached = sum(r.cached_tokens or 0 for r in told)
        told_prompts = sum(r.prompt_tokens or 0 for r in told)

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
            cached_tokens=cached if told else None,
            output_tokens=output,
            hit_rate=cached / told_prompts if told else None,
            ttft=Distribution.of(r.ttft for r in ok),
            ttft_from_due=Distribution.of(r.ttft_from_due for r in ok),
            itl=Distribution.of(gap for r in ok for gap in r.gaps),
            latency=Distribution.of(r.latency for r in ok),
            sent_late=Distribution.of(r.sent - r.due for r in sent if r.turn == 0),
        )

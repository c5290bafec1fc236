"""What became of one request. Times are seconds since the run's start."""

from __future__ import annotations

from dataclasses import dataclass

OUTCOMES = ("ok", "refused", "error", "timeout", "interrupted", "skipped")


@dataclass(frozen=True, slots=True)
class Result:
    """A request that was sent, or skipped because its session's earlier turn has no answer."""

    number: int
    session: str
    turn: int
    tenant: str
    outcome: str  # of OUTCOMES; refused: 429, 503 with Retry-After, or a stream that begins with such an error
    due: float  # when it was to be sent: its arrival, or in a closed loop the moment its client was free
    sent: float
    ended: float
    status: int | None = None
    detail: str = ""  # what went wrong
    ttft: float | None = None  # from sending to the first text, reasoning or tool call
    gaps: tuple[float, ...] = ()  # between the events that carried tokens
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    reason: str | None = None  # Headwater's, for where the request resumed
    resumed_at: int | None = None

    @property
    def ttft_from_due(self) -> float | None:
        """With what it waited to be sent, so that a server that holds back its clients gains nothing by it."""
        return None if self.ttft is None else self.ttft + self.sent - self.due

    @property
    def latency(self) -> float:
        """From sending to the end."""
        return self.ended - self.sent

    @property
    def token_time(self) -> float:
        """Seconds a token after the first; 0 for an answer that came at once."""
        if not self.gaps:
            return 0.0
        return sum(self.gaps) / max(len(self.gaps), (self.output_tokens or 0) - 1)

    def meets(self, slo_ttft: float, slo_itl: float) -> bool:
        first = self.ttft_from_due
        return self.outcome == "ok" and first is not None and first <= slo_ttft and self.token_time <= slo_itl

"""Hints in the requests of a replayed trace: ends, known in hindsight, times to live and priorities."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.errors import ConfigError
from headwater.plan import Retention
from headwater.request import PRIORITIES, TIMES_TO_LIVE
from headwater.setting import OFF
from headwater.traces.request import Request, Trace

ENDED, HIGH = "ended", "high"
SPELLING = "ended, high, 5m, 1h, or several kinds as ended+5m"
SESSIONS_PER_HIGH_PRIORITY = 4


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of all requests."""

    ended: bool = False  # the last request of each session ends it
    ttl: str | None = None  # time to live of the checkpoint after system prompt and tools
    high: bool = False  # requests of every fourth session have high priority

    @classmethod
    def read(cls, text: str) -> Hints | None:
        """Read off, or hints joined by +. Raises ConfigError for all else."""
        if text == OFF:
            return None
        words = text.split("+")
        ttls = [word for word in words if word in TIMES_TO_LIVE]
        if len(ttls) > 1 or len(set(words)) < len(words) or not {*words} <= {*ttls, ENDED, HIGH}:
            raise ConfigError(f"hints are {text!r}, must be {OFF}, or {SPELLING}")
        return cls(ENDED in words, ttls[0] if ttls else None, HIGH in words)

    def __str__(self) -> str:
        kinds = {ENDED: self.ended, HIGH: self.high, self.ttl: self.ttl}
        return "+".join(name for name, given in kinds.items() if name and given)

    def given(self, trace: Trace) -> Trace:
        """Return the trace with the hints in its requests. Retries end no conversation."""
        last = {request.session: number for number, request in enumerate(trace.requests)}
        order = {session: number for number, session in enumerate(last)}
        requests = (
            self._of(request, last[request.session] == number and not request.retry, order[request.session])
            for number, request in enumerate(trace.requests)
        )
        return replace(trace, requests=tuple(requests))

    def _of(self, request: Request, is_last: bool, session: int) -> Request:
        parts = request.boundaries
        if self.ttl is not None and parts.system_end:
            parts = replace(parts, retained=(Retention(parts.system_end, TIMES_TO_LIVE[self.ttl]),))
        priority = PRIORITIES["high"] if self.high and session % SESSIONS_PER_HIGH_PRIORITY == 0 else request.priority
        return replace(request, boundaries=parts, ended=self.ended and is_last, priority=priority)

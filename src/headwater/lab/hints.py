"""Hints that the requests of a replayed trace carry, known in hindsight: ends of conversations, times to live."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.errors import ConfigError
from headwater.plan import Retention
from headwater.request import TIMES_TO_LIVE
from headwater.traces.request import Request, Trace

OFF = "off"
ENDED = "ended"
SPELLING = "ended, 5m, 1h, or both kinds as ended+5m"


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of all requests."""

    ended: bool = False  # the last request of each session says so
    ttl: str | None = None  # time to live of the checkpoint after system prompt and tools

    @classmethod
    def read(cls, text: str) -> Hints | None:
        """Read off, or hints joined by +. Raises ConfigError for all else."""
        if text == OFF:
            return None
        words = text.split("+")
        ttls = [word for word in words if word in TIMES_TO_LIVE]
        if len(ttls) > 1 or sorted(words) != sorted([*ttls, *([ENDED] if ENDED in words else [])]):
            raise ConfigError(f"hints are {text!r}, must be {OFF}, or {SPELLING}")
        return cls(ENDED in words, ttls[0] if ttls else None)

    def __str__(self) -> str:
        return "+".join([*([ENDED] if self.ended else []), *([self.ttl] if self.ttl else [])])

    def given(self, trace: Trace) -> Trace:
        """Return the trace whose requests carry the hints. Retries end no conversation."""
        last = {request.session: number for number, request in enumerate(trace.requests)}
        requests = (
            self._of(request, last[request.session] == number and not request.retry)
            for number, request in enumerate(trace.requests)
        )
        return replace(trace, requests=tuple(requests))

    def _of(self, request: Request, is_last: bool) -> Request:
        parts = request.boundaries
        if self.ttl is not None and parts.system_end:
            parts = replace(parts, retained=(Retention(parts.system_end, TIMES_TO_LIVE[self.ttl]),))
        return replace(request, boundaries=parts, ended=self.ended and is_last)

"""Record of a request: its answers, what the cache did for them, and times, reported to watchers.

A record passes a request's events on, and reports to the log, the metrics, the live page and the traces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.account import CacheAccount
from headwater.events import FinishedEvent, TokenEvent
from headwater.server.http.exchange import Events
from headwater.server.http.middleware import RequestContext, current_context


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """End of one answer of a request. Times are seconds from the request's arrival."""

    request: RequestContext
    endpoint: str
    number: int  # within the request
    event: FinishedEvent
    submitted: float  # time at which the generation was submitted to the engine
    first_token: float
    total: float

    @property
    def account(self) -> CacheAccount:
        return self.event.account

    def as_dict(self) -> dict[str, object]:
        """Return the fields of the log and of /cache."""
        return {
            "request_id": self.request.id,
            "endpoint": self.endpoint,
            "number": self.number,
            **self.request.labels,
            **self.account.as_dict(),
            "output_tokens": self.event.output_tokens,
            "finish_reason": self.event.finish_reason,
            "ttft_seconds": round(self.first_token, 6),
            "total_seconds": round(self.total, 6),
        }


class Watcher:
    """Watcher of requests, with methods that do nothing unless overridden. They are called on the event loop."""

    def token(self, gap: float) -> None:
        """Note a token of an answer, `gap` seconds after the one before."""

    def ended(self, end: GenerationEnd) -> None:
        """Note a complete answer."""

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        """Note a request that failed, or whose client disconnected (error None)."""


@dataclass
class RequestRecord:
    """Record of one request."""

    endpoint: str
    watchers: Sequence[Watcher] = ()
    context: RequestContext = field(default_factory=current_context)

    def __post_init__(self) -> None:
        self._open = True
        self._first: dict[int, float] = {}  # time of each answer's first token, and of its last one so far
        self._last: dict[int, float] = {}

    def as_dict(self) -> dict[str, object]:
        """Return the fields of /cache for a request that has not ended."""
        context = self.context
        return {"request_id": context.id, "endpoint": self.endpoint, "total_seconds": round(context.seconds, 6)}

    async def watch(self, events: Events) -> Events:
        """Yield the events, and report the end or failure of each generation."""
        submitted = self.context.seconds
        try:
            async for number, event in events:
                if isinstance(event, TokenEvent):
                    self._token(number)
                elif isinstance(event, FinishedEvent):
                    self._end(number, event, submitted)
                yield number, event
            self._open = False
        except Exception as error:
            self.failed(error)
            raise

    def failed(self, error: Exception) -> None:
        """Close the record of a request that failed after the head of its answer."""
        self._close("failed", error)

    def close(self) -> None:
        """Close the record after the answer; reports a request whose client disconnected before."""
        if self._open:
            self._close("cancelled", None)

    def _close(self, outcome: str, error: Exception | None) -> None:
        self._open = False
        self.context.outcome = outcome
        for watcher in self.watchers:
            watcher.lost(self.context, self.endpoint, error)

    def _token(self, number: int) -> None:
        now = time.perf_counter()
        self.context.charge(1)
        if number in self._last:
            for watcher in self.watchers:
                watcher.token(now - self._last[number])
        self._first.setdefault(number, now)
        self._last[number] = now

    def _end(self, number: int, event: FinishedEvent, submitted: float) -> None:
        total = self.context.seconds
        first_token = self._first[number] - self.context.started if number in self._first else total
        end = GenerationEnd(self.context, self.endpoint, number, event, submitted, first_token, total)
        for watcher in self.watchers:
            watcher.ended(end)

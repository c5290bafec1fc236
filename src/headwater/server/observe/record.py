"""What is known of a request when it has ended: what it asked, what the cache did for it and why, and how long it took.

A record watches the events of one request go by and tells those who want to know: the log, the metrics, the list of
last requests, the traces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headwater.account import CacheAccount
from headwater.events import FinishedEvent, TokenEvent
from headwater.server.http.context import RequestContext, current_context
from headwater.server.http.exchange import Events


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """One answer of a request that came to its end. Times are seconds from the request's arrival."""

    request: RequestContext
    endpoint: str
    number: int  # within the request
    account: CacheAccount
    output_tokens: int
    finish_reason: str
    submitted: float  # when it was handed to the engine
    queued: float | None  # how long it waited there; None: not told
    first_token: float
    total: float

    def as_dict(self) -> dict[str, object]:
        return {
            "request_id": self.request.id,
            "endpoint": self.endpoint,
            "number": self.number,
            **self.account.as_dict(),
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "ttft_seconds": round(self.first_token, 6),
            "total_seconds": round(self.total, 6),
        }


class Watcher(Protocol):
    """Who wants to know what becomes of requests. Called on the event loop: must not block."""

    def token(self, gap: float) -> None:
        """An answer's token came `gap` seconds after the one before."""

    def ended(self, end: GenerationEnd) -> None:
        """An answer is complete."""

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        """A request failed, or (error None) its client left."""


@dataclass(slots=True)
class _Times:
    first: float
    last: float


@dataclass
class RequestRecord:
    """Watches a request's events go by."""

    endpoint: str
    watchers: Sequence[Watcher] = ()
    context: RequestContext = field(default_factory=current_context)

    def __post_init__(self) -> None:
        self._open = True
        self._times: dict[int, _Times] = {}

    async def watch(self, events: Events) -> Events:
        """The same events; tells of each generation's end, or that there was none."""
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
            self._close("failed", error)
            raise

    def close(self) -> None:
        """Call when the answer is out; tells if the client left before."""
        if self._open:
            self._close("cancelled", None)

    def _close(self, outcome: str, error: Exception | None) -> None:
        self._open = False
        self.context.outcome = outcome
        for watcher in self.watchers:
            watcher.lost(self.context, self.endpoint, error)

    def _token(self, number: int) -> None:
        now, times = time.perf_counter(), self._times.get(number)
        if times is None:
            self._times[number] = _Times(now, now)
            return
        for watcher in self.watchers:
            watcher.token(now - times.last)
        times.last = now

    def _end(self, number: int, event: FinishedEvent, submitted: float) -> None:
        times, total = self._times.get(number), self.context.seconds
        end = GenerationEnd(
            request=self.context,
            endpoint=self.endpoint,
            number=number,
            account=event.account,
            output_tokens=event.output_tokens,
            finish_reason=event.finish_reason,
            submitted=submitted,
            queued=event.queued_seconds,
            first_token=total if times is None else times.first - self.context.started,
            total=total,
        )
        for watcher in self.watchers:
            watcher.ended(end)

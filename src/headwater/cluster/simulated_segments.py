"""Segments that simulated workers compute for one that combines them, by the code of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from headwater.cache.segments.store import SegmentKey
from headwater.cluster.choice import Candidate, OpenRequests, Prompt
from headwater.cluster.digests import Digests
from headwater.cluster.preparing import Preparing, may_be_prepared, needed_by
from headwater.cluster.routed import Routed
from headwater.cluster.simulated_pulls import SimulatedPulls
from headwater.cluster.simulated_worker import SimulatedWorker
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage
from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.sequence import tokens_of
from headwater.traces.request import Request, Trace


def nobody(event: object) -> None:
    """Ignore an event: answers are the simulation's."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose segments a worker has now."""

    request: Request
    came: float  # seconds
    combiner: int
    composed: int  # tokens of the segments


@dataclass(eq=False)
class SimulatedLink:
    """A worker as the router's preparations see it."""

    worker: SimulatedWorker
    pulls: SimulatedPulls | None
    wake: Callable[[], None]
    named: dict[bytes, SimulatedPulls]  # memories of all workers, by their names
    orders: dict[int, SegmentKey] = field(default_factory=dict)  # that have not ended

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def incarnation(self) -> bytes:
        return self.worker.name.encode()

    @property
    def outstanding(self) -> OpenRequests:
        return self.worker.outstanding

    def has_segment(self, digest: int) -> bool:
        return self.worker.picture.has_segment(digest)

    def send(self, message: Prepare | Cancel) -> None:
        """Take an order; none is ever cancelled."""
        assert isinstance(message, Prepare), "no client leaves, and no request is late"
        key, scheduler = SegmentKey.decoded(message.segment), self.worker.serving.scheduler
        self.orders[message.request] = key
        if self.pulls is not None and message.peers:
            self.pulls.expect(key, self.named[message.peers[0]])
        if key not in scheduler.wanted and scheduler.composer.find(key) is None:
            scheduler.wanted.append(key)
        self.wake()

    def take_ended(self) -> list[PreparedMessage]:
        """Return the ends of orders since the last time."""
        scheduler, ended = self.worker.serving.scheduler, []
        for number, key in list(self.orders.items()):
            stored = scheduler.composer.find(key)
            if stored.ready if stored is not None else key not in scheduler.wanted:
                del self.orders[number]
                ended.append(PreparedMessage(number, 0, stored is not None))
        return ended


class SimulatedSegments:
    """Preparations of the simulated router."""

    def __init__(
        self,
        trace: Trace,
        digests: Digests,
        conv_taps: int,
        links: Sequence[SimulatedLink],
        ready: Callable[[Prepared], None],
    ) -> None:
        """`ready`: called with each request that its combining worker can take now."""
        self._trace, self._digests, self._conv_taps, self._links = trace, digests, conv_taps, links
        self._route = ready
        self.counts: Counter[str] = Counter()
        self._preparing = Preparing(count(1), self._ready, self.counts)
        self._numbers = count()
        self._waiting: dict[int, Request] = {}

    def chosen(
        self,
        request: Request,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        combiners: Sequence[int],
        otherwise: int,
        now: float,
    ) -> int | None:
        """Return the worker that a composed request goes to now; None: it waits for its segments.

        `otherwise`: the worker for a request that is composed of none.
        """
        key = self._trace.ids(request, Span(0, request.prompt_tokens))
        generation = Generation(
            tokens_of(key), SamplingParams(), request.namespace, segments=request.segments, fidelity=request.fidelity
        )
        routed = Routed(next(self._numbers), generation, nobody, now, key)
        needed = needed_by(routed, self._digests, self._conv_taps) if may_be_prepared(routed) else []
        if not needed:
            return otherwise
        at = self._preparing.combine(routed, needed, prompt, self._links, candidates, combiners)
        if at is None:
            self._waiting[routed.id] = request
        return at

    def look(self, n: int) -> None:
        """Take what has become of a worker's orders."""
        for message in self._links[n].take_ended():
            self._preparing.prepared(message)

    def _ready(self, routed: Routed) -> None:
        at = next(n for n, link in enumerate(self._links) if link is routed.combiner)
        self._route(Prepared(self._waiting.pop(routed.id), routed.began, at, routed.composed))

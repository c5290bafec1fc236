"""Simulated worker as the code of the router sees it: as a choice for a prompt, and as a holder of segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.cache.segments.store import SegmentKey
from headwater.cluster.choice import Candidate, OpenRequests, Prompt
from headwater.cluster.simulated_pulls import SimulatedPulls
from headwater.cluster.simulated_worker import SimulatedWorker
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage


@dataclass(eq=False)
class SimulatedLink:
    """One worker. Its router hears of its caches by events, and all else at once."""

    worker: SimulatedWorker
    pulls: SimulatedPulls | None
    clock: Callable[[], float]
    wake: Callable[[], None]  # called when the worker has an order
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

    @property
    def unit_bytes(self) -> int:
        return self.worker.layout.unit_bytes

    def candidate(self, prompt: Prompt) -> Candidate:
        return self.worker.candidate(prompt, self.clock())

    def has_segment(self, digest: int) -> bool:
        return self.worker.picture.has_segment(digest)

    def stores_of(self, digest: int) -> list[str]:
        return self.worker.picture.stores_of(digest)

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

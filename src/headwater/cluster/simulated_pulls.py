"""Pulls of a simulated worker: prefixes and segments in the memory of workers that the router names, by network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey
from headwater.lab.replayed import Replayed
from headwater.lab.serving import Serving
from headwater.lab.setup import Network
from headwater.lab.tiers import STORE, LabLoads, Line
from headwater.schedule.kinds.request import Request
from headwater.schedule.segment_loads import Awaited, SegmentLoad, SegmentLoads
from headwater.schedule.tier_load import Load, Offer, OpenLoad, PullSpeed
from headwater.tiers.names import runs_of
from headwater.tiers.store import PEER

SENDER = 0  # number of the tier that a segment's sender is
PEERS = 1  # number of the first worker among the tiers of a prefix, after the store


class SimulatedPulls(LabLoads):
    """Both ends of one worker's pulls, and its store. It receives one prefix after the other, and sends likewise."""

    def __init__(
        self,
        number: int,
        network: Network,
        serving: Serving,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """`number`: of the worker. `clock`: of the cluster. `wake`: called when pages that were sent can be evicted."""
        given = serving.scheduler, serving.page_bytes, serving.prefill_seconds, clock, serving.setup.tier
        super().__init__(*given)
        self._link = Line(network.bandwidth, network.latency)
        self.number, self._wake = number, wake
        self.pulled = self.failed = 0  # prefixes
        self._sends_until = 0.0
        self._named: dict[int, Sequence[SimulatedPulls]] = {}  # by the identity of the trace's request
        self._peers: dict[int, SimulatedPulls] = {}  # by the number of their tier, those that were named
        self._pulling: dict[int, tuple[SimulatedPulls, int]] = {}  # by load: the sender, and the id of its lease
        self._segments = SegmentLoads(serving.cache, self, serving.scheduler.new_id)
        self._senders: dict[SegmentKey, SimulatedPulls] = {}  # of segments that others are said to have
        serving.use(self)

    @property
    def pull_speed(self) -> PullSpeed:
        a_token = self._sizes.bytes(False, self.run_tokens) / self.run_tokens / self._link.bandwidth
        return PullSpeed(self.load_seconds(PEERS, True, 0), a_token)

    def name(self, request: object, peers: Sequence[SimulatedPulls]) -> None:
        """Note that these workers have more of the prompt of a request of the trace, which is going to arrive."""
        self._named[id(request)] = peers
        self._peers |= {PEERS + peer.number: peer for peer in peers}

    def _offers(self, seq: Request) -> Iterator[Offer]:
        """Yield what the store holds of a prompt, and what the first worker has that was named and has any of it."""
        assert isinstance(seq, Replayed), "requests of the lab are those of a trace"
        yield from super()._offers(seq)
        unit = self._sizes.layout.unit_tokens
        for peer in self._named.pop(id(seq.request), ()):
            end = peer._scheduler.cache.match(seq.key, seq.n_prompt, seq.namespace).checkpoint_tokens
            if end:
                runs = runs_of(end // unit, self.run_tokens // unit)
                whole = frozenset((start * unit, stop * unit) for start, stop in runs)
                yield Offer(PEERS + peer.number, frozenset((end,)), whole)
                return

    # -- segments

    def expect(self, key: SegmentKey, sender: SimulatedPulls) -> None:
        """Note that a worker has a segment."""
        self._senders[key] = sender

    def hold_segments(self, awaited: Awaited, keys: Sequence[SegmentKey]) -> set[SegmentKey]:
        sought = [key for key in keys if key in self._senders]
        for key in self._segments.hold_back(awaited, sought):
            self._segments.answered(key, SENDER, True)  # a router has said so
        return self._segments.hold_back(awaited, sought)

    def look_up_segments(self, keys: Sequence[SegmentKey]) -> Set[int]:
        return {SENDER}

    def segment_seconds(self, tier: int, key: SegmentKey) -> float:
        return self._link.wait(self._now()) + self._link.seconds(self._size_of(key))

    def _size_of(self, key: SegmentKey) -> int:
        return sum(self._scheduler.cache.segments.needs(key)) * self._sizes.page_bytes

    def begin_segment(self, load: SegmentLoad) -> None:
        sender = self._senders[load.key]
        stored = sender._scheduler.cache.segments.find(load.key)
        if stored is None or not stored.ready:
            load.failed = TierOutcome.FAILED  # it was evicted since
        else:
            sender._scheduler.cache.segments.pin(stored)
        size = self._size_of(load.key)
        load.seconds, load.tiers = self._link.seconds(size), PEER
        ends = self._link.read(max(self._now(), sender._sends_until), size)
        self._ends(load, ends)
        if load.failed is None:
            sender._sends_until = ends

    def _finish(self, load: OpenLoad) -> None:
        if not isinstance(load, SegmentLoad):
            super()._finish(load)
            self._was_pulled(load)
            return
        self._segments.finished(load)
        if load.failed is None:
            sender = self._senders[load.key]
            stored = sender._scheduler.cache.segments.find(load.key)
            assert stored is not None, "it was pinned"
            sender._scheduler.cache.segments.unpin(stored)
            sender._was_sent()
            self.loaded_segments += 1

    def _was_sent(self) -> None:
        """Note that what was sent may be evicted again."""
        self._scheduler.room_was_made()
        self._wake()

    # -- prefixes

    def begin(self, load: Load) -> None:
        from_peer = [source for source in (*load.runs, load.state) if source.tier != STORE]
        if from_peer:
            sender, last = self._peers[from_peer[-1].tier], from_peer[-1]
            lease = sender._scheduler.new_id()
            held = sender._scheduler.cache.hold(lease, load.namespace, load.key, last.end, last is load.state)
            if held is None:
                load.failed = TierOutcome.FAILED  # it was evicted since it was offered
            else:
                self._pulling[load.id] = sender, lease
        super().begin(load)
        if load.id in self._pulling:
            self._pulling[load.id][0]._sends_until = self._link.free_at

    def _line(self, tier: int) -> Line:
        return super()._line(tier) if tier == STORE else self._link

    def _kind(self, tier: int) -> str:
        return super()._kind(tier) if tier == STORE else PEER

    def _read(self, tier: int, now: float, size: int) -> float:
        if tier == STORE:
            return super()._read(tier, now, size)
        return super()._read(tier, max(now, self._peers[tier]._sends_until), size)

    def _was_pulled(self, load: OpenLoad) -> None:
        """Count a load of which another worker had a part, and let that one evict it again."""
        if load.failed is not None:
            self.failed += 1
        elif load.id in self._pulling:
            self.pulled += 1
            sender, lease = self._pulling.pop(load.id)
            sender._scheduler.cache.release(lease)
            sender._was_sent()

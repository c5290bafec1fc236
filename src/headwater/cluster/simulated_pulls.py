"""Pulls of a simulated worker: prefixes and segments in the memory of workers that the router names, by network."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey
from headwater.lab.replayed import Replayed
from headwater.lab.serving import Serving
from headwater.lab.setup import Network
from headwater.lab.tiers import LabLoads
from headwater.schedule.kinds.request import Request
from headwater.schedule.segment_loads import Awaited, SegmentLoad, SegmentLoads
from headwater.schedule.tier_load import Load, Offer, OpenLoad, PullSpeed
from headwater.tiers.names import runs_of
from headwater.tiers.store import PEER

SENDER = 0  # number of the tier that a segment's sender is


class SimulatedPulls(LabLoads):
    """Both ends of one worker's pulls. It receives one prefix after the other, and sends one after the other."""

    def __init__(self, number: int, network: Network, serving: Serving, wake: Callable[[float], None]) -> None:
        """`number`: of the worker. `wake`: called when pages that were sent may be evicted again, with the time."""
        loads = network.bandwidth, network.latency, serving.scheduler, serving.page_bytes
        super().__init__(*loads, serving.prefill_seconds, lambda: serving.now)
        self.number, self._wake = number, wake
        self.pulled = self.failed = 0  # prefixes
        self._sends_until = 0.0
        self._named: dict[int, Sequence[SimulatedPulls]] = {}  # by the identity of the trace's request
        self._peers: dict[int, SimulatedPulls] = {}  # by number, those that were named
        self._pulling: dict[int, tuple[SimulatedPulls, int]] = {}  # by load: the sender, and the id of its lease
        self._segments = SegmentLoads(serving.cache, self, serving.scheduler.new_id)
        self._senders: dict[SegmentKey, SimulatedPulls] = {}  # of segments that others are said to have
        serving.use(self)

    @property
    def pull_speed(self) -> PullSpeed:
        a_token = self._bytes(False, self.run_tokens) / self.run_tokens / self._bandwidth
        return PullSpeed(self.load_seconds(0, True, 0), a_token)

    def name(self, request: object, peers: Sequence[SimulatedPulls]) -> None:
        """Note that these workers have more of the prompt of a request of the trace, which is going to arrive."""
        self._named[id(request)] = peers
        self._peers |= {peer.number: peer for peer in peers}

    def arrived(self, seq: Request) -> None:
        assert isinstance(seq, Replayed), "requests of the lab are those of a trace"
        unit = self._layout.unit_tokens
        for peer in self._named.pop(id(seq.request), ()):
            end = peer._scheduler.cache.match(seq.key, seq.n_prompt, seq.namespace).checkpoint_tokens
            if end:
                runs = runs_of(end // unit, self.run_tokens // unit)
                whole = frozenset((start * unit, stop * unit) for start, stop in runs)
                self._offer(seq, Offer(peer.number, frozenset((end,)), whole))
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
        waiting = max(0.0, self._reading[-1][0] - self._now()) if self._reading else 0.0
        return waiting + self._seconds_of(key)

    def _seconds_of(self, key: SegmentKey) -> float:
        pages = sum(self._scheduler.cache.segments.needs(key))
        return self._latency + pages * self._page_bytes / self._bandwidth

    def begin_segment(self, load: SegmentLoad) -> None:
        sender = self._senders[load.key]
        stored = sender._scheduler.cache.segments.find(load.key)
        if stored is None or not stored.ready:
            load.failed = TierOutcome.FAILED  # it was evicted since
        else:
            sender._scheduler.cache.segments.pin(stored)
        begun = max(self._now(), self._reading[-1][0] if self._reading else 0.0, sender._sends_until)
        load.seconds, load.tiers = self._seconds_of(load.key), PEER
        self._reading.append((begun + load.seconds, load))
        if load.failed is None:
            sender._sends_until = begun + load.seconds

    def _finish(self, load: OpenLoad) -> None:
        if not isinstance(load, SegmentLoad):
            super()._finish(load)
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
        self._wake(self._now())

    # -- prefixes

    def begin(self, load: Load) -> None:
        sender = self._peers[load.state.tier]
        lease = sender._scheduler.new_id()
        if sender._scheduler.cache.hold(lease, load.namespace, load.key, load.plan.end) is None:
            load.failed = TierOutcome.FAILED  # it was evicted since it was offered
        else:
            self._pulling[load.id] = sender, lease
        super().begin(load)
        load.tiers = PEER
        if load.failed is None:
            sender._sends_until = self._reading[-1][0]

    def _free_at(self, load: Load) -> float:
        return max(super()._free_at(load), self._peers[load.state.tier]._sends_until)

    def _was_read(self, load: Load) -> None:
        if load.failed is not None:
            self.failed += 1
            return
        self.pulled += 1
        sender, lease = self._pulling.pop(load.id)
        sender._scheduler.cache.release(lease)
        sender._was_sent()

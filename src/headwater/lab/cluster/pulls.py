"""Pulls of a simulated worker: prefixes and segments in the memory of workers that the router names, by network.

A prefill on another worker is followed as in the server, except that new parts are known at once. Parts that are found
together are read together: the link's latency counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey
from headwater.lab.serving import Serving
from headwater.lab.setup import Network
from headwater.lab.tiers import STORE, LabLoads, Line
from headwater.schedule.follows import Follow, Follows, progress
from headwater.schedule.kinds.request import Request
from headwater.schedule.replayed import Replayed
from headwater.schedule.segment_loads import Awaited, SegmentLoad, SegmentLoads
from headwater.schedule.tier_load import Load, Offer, Source
from headwater.schedule.tiers import TierFigures
from headwater.tiers.names import STATE, runs_of
from headwater.tiers.store import PEER

SENDER = 0  # number of the tier that a segment's sender is
PEERS = 1  # number of the first worker among the tiers of a prefix, after the store


@dataclass(eq=False, slots=True)
class Following:
    """Followed prefill, and the time at which the parts that are being read are there."""

    follow: Follow
    sender: SimulatedPulls
    until: float = 0.0  # seconds


class SimulatedPulls(LabLoads):
    """Both ends of one worker's pulls, and its store. It receives one prefix after the other, and sends likewise."""

    def __init__(
        self, number: int, network: Network, serving: Serving, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """`number`: of the worker. `clock`: of the cluster. `wake`: called when pages that were sent can be evicted."""
        given = serving.scheduler, serving.page_bytes, serving.prefill_seconds, clock, serving.setup.tier
        super().__init__(*given)
        self._link = Line(network.bandwidth, network.latency)
        self.number, self._wake = number, wake
        self.pulled = self.followed = self.failed = 0  # prefixes
        self.is_lost = False  # the worker has failed: parts that are being read still come
        self._sends_until = 0.0
        self._named: dict[int, Sequence[SimulatedPulls]] = {}  # by the identity of the trace's request
        self._peers: dict[int, SimulatedPulls] = {}  # by the number of their tier, those that were named
        self._pulling: dict[int, tuple[SimulatedPulls, int]] = {}  # by load: the sender, and the id of its lease
        self._follows = Follows(serving.cache, self._loads, serving.scheduler.new_id)
        self._following: list[Following] = []
        self._followed_for: dict[int, int] = {}  # numbers of prefills, by the identity of the trace's request
        self._segments = SegmentLoads(serving.cache, self, serving.scheduler.new_id)
        self._senders: dict[SegmentKey, SimulatedPulls] = {}  # of segments, as the router names them
        serving.use(self)

    def figures(self) -> TierFigures:
        return replace(super().figures(), pull=self._speed(PEERS))

    def name(self, request: object, peers: Sequence[SimulatedPulls], followed: int | None) -> None:
        """Note that these workers have more of the prompt of a request that will arrive.

        `followed`: number of its prefill that was followed.
        """
        self._named[id(request)] = peers
        self._peers |= {PEERS + peer.number: peer for peer in peers}
        if followed is not None:
            self._followed_for[id(request)] = followed

    def arrived(self, seq: Request) -> None:
        assert isinstance(seq, Replayed), "requests of the lab are those of a trace"
        followed = self._followed_for.pop(id(seq.request), None)
        if followed is not None:
            self._follows.arrived(seq, followed)
            self.look()  # the prefill has ended: missing parts do not come any more
        super().arrived(seq)

    @property
    def busy(self) -> bool:
        return super().busy or any(one.follow.load is not None for one in self._following)

    def _offers(self, seq: Request) -> Iterator[Offer]:
        """Yield the offer of the store, and that of the first named worker with any of the prompt."""
        assert isinstance(seq, Replayed), "as in `arrived`"
        yield from super()._offers(seq)
        unit = self._sizes.layout.unit_tokens
        for peer in self._named.pop(id(seq.request), ()):
            if peer.is_lost:
                continue
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
            self._segments.answered(key, SENDER, True)  # the router has named it
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
        if stored is None or not stored.ready or sender.is_lost:
            load.failed = TierOutcome.FAILED  # it was evicted meanwhile, or the worker has failed
        else:
            sender._scheduler.cache.segments.pin(stored)
        size = self._size_of(load.key)
        load.seconds, load.tiers = self._link.seconds(size), PEER
        ends = self._link.read(max(self._now(), sender._sends_until), size)
        self._at(ends, partial(self._segment_read, load))
        if load.failed is None:
            sender._sends_until = ends

    def _segment_read(self, load: SegmentLoad) -> None:
        self._segments.finished(load)
        if load.failed is None:
            sender = self._senders[load.key]
            stored = sender._scheduler.cache.segments.find(load.key)
            assert stored is not None, "it was pinned"
            sender._scheduler.cache.segments.unpin(stored)
            sender._was_sent()
            self.loaded_segments += 1

    def _was_sent(self) -> None:
        """Note that sent parts may be evicted again."""
        self._scheduler.room_was_made()
        self._wake()

    # -- prefixes

    def begin(self, load: Load) -> None:
        from_peer = [source for source in load.sources if source.tier != STORE]
        if from_peer:
            sender, last = self._peers[from_peer[-1].tier], from_peer[-1]
            lease = sender._scheduler.new_id()
            held = sender._scheduler.cache.hold(lease, load.namespace, load.key, last.end, last.kind == STATE)
            if held is None:
                load.failed = TierOutcome.FAILED  # it was evicted after the offer
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

    def _finish(self, load: Load) -> None:
        super()._finish(load)
        if load.failed is not None:
            self.failed += not load.follows
        elif load.follows:
            self.followed += 1
        elif load.id in self._pulling:
            self.pulled += 1
            self._release(*self._pulling.pop(load.id))

    def _release(self, sender: SimulatedPulls, lease: int) -> None:
        """Let a worker evict again the parts that it has sent."""
        sender._scheduler.cache.release(lease)
        sender._was_sent()

    # -- prefills that are followed

    def follow_prefill(self, sender: SimulatedPulls, namespace: str, key: bytes, tokens: int) -> int:
        """Follow a worker's prefill of a prompt; return its number for `name`."""
        tier = PEERS + sender.number
        self._peers[tier] = sender
        number, begun = self._follows.begin(b"%d" % sender.number, namespace, key, tokens, tier)
        if begun is not None:
            self._following.append(Following(begun, sender))
            self.look()
        return number

    def unfollow(self, number: int) -> None:
        """Stop following a prefill. Unknown numbers are ignored."""
        self._follows.cancel(number)

    @property
    def follows_any(self) -> bool:
        """True if parts of a followed prefill are still to come."""
        return bool(self._following)

    def look(self) -> None:
        """Read the new parts of followed prefills."""
        for one in self._following[:]:
            if self._looked_at(one):
                one.follow.is_over = True
                self._following.remove(one)

    def _looked_at(self, one: Following) -> bool:
        """Read the new parts of a prefill; return whether that was the last read."""
        follow = one.follow
        there = progress(one.sender._scheduler.cache, follow.namespace, follow.key, follow.at)
        load = follow.load
        if load is not None and (ready := follow.take_ready(there)):
            one.until = self._read_parts(one, load, ready)
        if load is not None and follow.is_complete:
            load.tiers = PEER
            self._at(one.until, partial(self._finish, load))
            return True
        if not (follow.has_ended or follow.is_given_up or one.sender.is_lost):
            return False
        if load is not None:
            load.failed, load.tiers = TierOutcome.FAILED, PEER
            self._at(max(self._now(), one.until), partial(self._finish, load))
        return True

    def _read_parts(self, one: Following, load: Load, parts: Sequence[Source]) -> float:
        """Read parts that the sender has and keeps until they arrive; return the time of that."""
        sender, has_state = one.sender, parts[-1].kind == STATE
        lease = sender._scheduler.new_id()
        held = sender._scheduler.cache.hold(lease, load.namespace, load.key, parts[-1].end, has_state)
        assert held is not None, "it was there just now"
        tokens = sum(part.end - part.start for part in parts if part.kind != STATE)
        ends = self._read(parts[-1].tier, self._now(), self._sizes.bytes(has_state, tokens))
        sender._sends_until = ends
        self._at(ends, partial(self._release, sender, lease))
        return ends

    def make_room(self) -> bool:
        self._follows.give_up()
        self.look()
        return super().make_room()

"""Pulls of a simulated worker: prefixes come from the memory of workers that the router names, over a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.account import TierOutcome
from headwater.lab.replayed import Replayed
from headwater.lab.serving import Serving
from headwater.lab.setup import Network
from headwater.lab.tiers import LabLoads
from headwater.schedule.kinds.request import Request
from headwater.schedule.tier_load import Load, Offer, PullSpeed
from headwater.tiers.names import runs_of
from headwater.tiers.store import PEER


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
        sender._scheduler.room_was_made()
        sender._wake(self._now())

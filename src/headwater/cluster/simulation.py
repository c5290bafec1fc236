"""Simulated cluster: the lab's servers behind a router that chooses as the real one does, all under one clock.

Messages between router and workers take no time, except events by the given delay. A worker's report of its queue is
that of now. Rows are those of the lab.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from headwater.account import CacheAccount
from headwater.cluster.choice import LeastCost, Outstanding, Prompt, Role, holders, price_pulls
from headwater.cluster.digests import Digests
from headwater.cluster.disaggregation import decoders, note_prefilled, prefiller
from headwater.cluster.rivals import make_choice
from headwater.cluster.simulated_pulls import SimulatedPulls
from headwater.cluster.simulated_segments import Prepared, SimulatedLink, SimulatedSegments
from headwater.cluster.simulated_worker import Inbox, Sent, SimulatedWorker
from headwater.errors import ConfigError
from headwater.lab.replay import result_of, timed
from headwater.lab.row import Result, Routing
from headwater.lab.serving import Engine
from headwater.lab.setup import Cluster, Setup, as_reused
from headwater.lab.speculation import OFF
from headwater.lab.tally import Ideal, SegmentWork, Tally
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Request, Trace

KEY = b"simulated"
END, ARRIVAL, BEGIN = range(3)  # kinds of events, in their order at one time


def simulate(trace: Trace, setup: Setup, arrivals: Arrivals, engine: Engine | None = None, workers: int = 0) -> Result:
    """Replay `trace` as it arrives at a cluster. workers: not used here.

    Raises ConfigError if memory and model do not go together, or the router's rule is unknown.
    """
    if setup.cluster is None or engine is None:
        raise ConfigError("a cluster is simulated under a clock only: give a device with --serve")
    begun = time.process_time()
    simulation = Simulation(trace, setup, setup.cluster, arrivals, engine)
    tally = simulation.run()
    servings = [worker.serving for worker in simulation.workers]
    result = result_of(trace, setup, tally, [one.cache for one in servings], time.process_time() - begun)
    result = timed(result, servings)
    return replace(result, row=replace(result.row, cluster=simulation.routing))


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A request of which a worker computes the prompt and the first token, and the whole one."""

    first: Request
    whole: Request


def roles(cluster: Cluster) -> list[Role]:
    """Return the roles of a cluster's workers. Raises ConfigError if none can prefill for another."""
    if not cluster.prefill:
        return [Role.BOTH] * cluster.workers
    if cluster.prefill >= cluster.workers or cluster.network is None:
        shown = "off" if cluster.network is None else str(cluster.network)
        raise ConfigError(
            f"prefill is {cluster.prefill} of {cluster.workers} workers with pulls {shown}: "
            "others must decode, and pull from them"
        )
    return [Role.PREFILL] * cluster.prefill + [Role.DECODE] * (cluster.workers - cluster.prefill)


class Simulation:
    """One run; `run` returns when the last request is answered."""

    def __init__(self, trace: Trace, setup: Setup, cluster: Cluster, arrivals: Arrivals, engine: Engine) -> None:
        self._trace, self._setup, self._cluster, self._arrivals = trace, setup, cluster, arrivals
        self._choice = make_choice(cluster.router)
        layout = setup.layout(trace)
        self._digests, self._block_tokens = Digests(KEY, layout.unit_bytes), layout.unit_tokens
        self._turns = Counter(request.session for request in trace.requests)
        self._counts: Counter[str] = Counter()
        self._now = 0.0
        self._events: list[tuple[float, int, int]] = []  # (time, END or BEGIN, worker)
        self._prefills: dict[int, Prefilling] = {}  # by the identity of what its worker was sent
        self._decodes: dict[int, float] = {}  # by the identity of a request that goes on: when its first token came
        self.workers = [
            SimulatedWorker(f"w{n}", role, trace, setup, engine, self._digests, cluster.event_delay)
            for n, role in enumerate(roles(cluster))
        ]
        self._pulls: list[SimulatedPulls] = []
        if cluster.network is not None:
            if setup.tier is not None:
                raise ConfigError(f"pulls and a tier are not simulated together: tier is {setup.tier}")
            ends = ((n, worker, partial(self._may_evict, n)) for n, worker in enumerate(self.workers))
            self._pulls = [SimulatedPulls(n, cluster.network, one.serving, wake) for n, one, wake in ends]
        self._segments = self._prepared()
        ideal = Ideal(trace, layout.unit_tokens)
        self._total = Tally(layout.flops, len(arrivals), SegmentWork(layout.flops))
        for worker in self.workers:
            tally = Tally(
                layout.flops,
                len(arrivals),
                worker.serving.segment_work,
                outcomes=self._total.outcomes,
                token_seconds=self._total.token_seconds,
                added=partial(self._begun, worker),
                goes_on=partial(self._goes_on, worker),
            )
            worker.watch(Inbox(arrivals.due, partial(self._answered, worker)), tally, ideal)

    def run(self) -> Tally:
        while True:
            due, event = self._arrivals.due(), self._events[0] if self._events else None
            if due is not None and (event is None or (due, ARRIVAL) < event[:2]):
                self._route(self._arrivals.take(), due)
            elif event is not None:
                at, kind, n = heapq.heappop(self._events)
                (self._end if kind == END else self._begin)(at, n)
            else:
                return self._summed()

    def _prepared(self) -> SimulatedSegments | None:
        """Return the preparations of segments; None if no prompt is composed."""
        if not (self._trace.has_segments and self._setup.composes):
            return None
        pulls: list[SimulatedPulls | None] = [*self._pulls] or [None for _ in self.workers]
        named = {one.name.encode(): pull for one, pull in zip(self.workers, pulls, strict=True) if pull is not None}
        links = [
            SimulatedLink(worker, pull, partial(self._ordered, n), named)
            for n, (worker, pull) in enumerate(zip(self.workers, pulls, strict=True))
        ]
        taps = self._setup.profile.state.conv_taps
        return SimulatedSegments(self._trace, self._digests, taps, links, self._combine)

    def _ordered(self, n: int) -> None:
        """Let a worker see an order now, or when its step ends."""
        worker = self.workers[n]
        if worker.serving.work is None:
            if worker.wakes is None or worker.wakes > self._now:
                self._wake(worker, n, self._now)
        else:
            worker.serving.shorten(self._now)
            heapq.heappush(self._events, (worker.serving.ends, END, n))

    def _combine(self, prepared: Prepared) -> None:
        """Send a request whose segments are prepared to the worker that has them."""
        self._route(prepared.request, self._now, prepared=prepared)

    def _route(
        self, request: Request, now: float, prefilled_by: str | None = None, prepared: Prepared | None = None
    ) -> None:
        """Send a request to a worker: one that arrives now, or whose first token `prefilled_by` has sampled.

        Or one whose segments were `prepared`.
        """
        self._now = now
        prompt = self._prompt(request)
        candidates = [worker.candidate(prompt, now) for worker in self.workers]
        if prefilled_by is not None:
            note_prefilled(prompt, prefilled_by, candidates)
        price_pulls(candidates)
        whole = prefilled_by is not None or request.output_tokens < 2 or request.segments
        alone = None if whole else prefiller(prompt, candidates)
        if alone is None:
            serving = decoders(candidates)
            n = serving[self._choice.choose(prompt, [candidates[i] for i in serving])]
            if prepared is not None:
                n = prepared.combiner
                candidates[n].compose(prompt, prepared.composed)
            elif self._segments is not None and request.segments and len(candidates) > 1:
                combiners = serving if isinstance(self._choice, LeastCost) else [n]
                at = self._segments.chosen(request, prompt, candidates, combiners, n, now)
                if at is None:
                    return
                n = at
        else:
            n, whole_request = alone, request
            request = replace(request, output_tokens=1, known_tokens=request.prompt_tokens, ended=False)
            self._prefills[id(request)] = Prefilling(request, whole_request)
        worker, predicted = self.workers[n], candidates[n].reusable
        matched = worker.match(request)
        self._counts["as_predicted" if matched == predicted else "less" if matched < predicted else "more"] += 1
        if self._pulls:
            self._pulls[n].name(request, [self._pulls[at] for at in holders(n, candidates)])
        outstanding = Outstanding(prompt, candidates[n].uncached(prompt), prefilled_by is not None)
        came = now if prepared is None else prepared.came
        worker.receive(request, Sent(outstanding, came, predicted, matched), now)
        if worker.serving.work is not None:
            heapq.heappush(self._events, (worker.serving.ends, END, n))  # it may end sooner now
        elif worker.wakes is None or worker.wakes > now:  # it waits for a tier
            self._wake(worker, n, now)

    def _prompt(self, request: Request) -> Prompt:
        """Return a prompt with its digests, and its session if that has several requests."""
        reused = as_reused(request, self._setup.reuse)
        key = self._trace.key(reused, reused.prompt_tokens)
        blocks = self._digests.prefix(reused.namespace, key)
        session = request.session if self._turns[request.session] > 1 else ""
        return Prompt(request.prompt_tokens, blocks, self._block_tokens, session)

    def _may_evict(self, n: int, now: float) -> None:
        """Note that a worker, which may wait for memory, may evict a prefix that it has sent."""
        if self.workers[n].serving.work is None:
            self._wake(self.workers[n], n, now)

    def _wake(self, worker: SimulatedWorker, n: int, at: float) -> None:
        worker.wakes = at
        heapq.heappush(self._events, (at, BEGIN, n))

    def _end(self, at: float, n: int) -> None:
        worker = self.workers[n]
        if worker.serving.work is None or worker.serving.ends != at:
            return  # the work ended sooner
        self._now = at
        worker.end()
        self._wake(worker, n, at)
        self._look(n)

    def _begin(self, at: float, n: int) -> None:
        worker = self.workers[n]
        if worker.wakes != at:
            return  # it was woken sooner
        worker.wakes, self._now = None, at
        self._begin_work(at, n)
        self._look(n)

    def _begin_work(self, at: float, n: int) -> None:
        worker = self.workers[n]
        ends = worker.begin(at)
        if ends is not None:
            heapq.heappush(self._events, (ends, END, n))
            return
        store = worker.serving.tiers
        if store is not None and (read := store.due()) is not None:
            self._wake(worker, n, max(at, read))
        elif not worker.serving.scheduler.idle:  # as one server does it: again when the next request comes
            due = self._arrivals.due()
            self._wake(worker, n, at if due is None else max(at, due))

    def _look(self, n: int) -> None:
        if self._segments is not None:
            self._segments.look(n)

    # -- what becomes of requests

    def _begun(self, worker: SimulatedWorker, request: Request, account: CacheAccount | None) -> None:
        if id(request) in self._prefills:
            whole = self._prefills[id(request)].whole
            self._total.outcomes[-1] = replace(self._total.outcomes[-1], output_tokens=whole.output_tokens)
        sent = worker.first_token(request)
        if id(request) not in self._prefills:  # else the rule has not chosen its worker
            self._choice.begun(sent.outstanding.prompt, worker.name)
        resumed = 0 if account is None else account.resumed_at
        if resumed != sent.matched:
            self._counts["lost_waiting" if resumed < sent.matched else "gained_waiting"] += 1

    def _goes_on(self, worker: SimulatedWorker, request: Request) -> bool:
        """Return whether another worker has prefilled a request, which was counted there."""
        if id(request) not in self._decodes:
            return False
        self._choice.begun(worker.open[id(request)].outstanding.prompt, worker.name)
        return True

    def _answered(self, worker: SimulatedWorker, request: Request, now: float) -> None:
        sent = worker.answered(request, now)
        done = self._prefills.pop(id(request), None)
        if done is not None:
            self._counts["handed_over"] += 1
            self._decodes[id(done.whole)] = now
            self._route(done.whole, now, worker.name)
            return
        first_token = self._decodes.pop(id(request), None)
        if first_token is not None:  # the hand-over is a part of the time of the tokens after the first
            self._total.token_seconds[-1] = (now - first_token) / (request.output_tokens - 1)
        self._choice.ended(sent.outstanding.prompt, worker.name)
        self._arrivals.answered(request, now)

    def _summed(self) -> Tally:
        """Return the sums of all workers' tallies."""
        total = self._total
        for worker in self.workers:
            worker.serving.tuning.close()
            total.join(worker.tally)
        if len(self.workers) == 1:
            total.held = self.workers[0].tally.held
        return total

    @property
    def routing(self) -> Routing:
        """Requests by worker, and by what became of predictions."""
        names = ("as_predicted", "more", "less", "lost_waiting", "gained_waiting")
        return Routing(
            router=self._cluster.router,
            event_delay=self._cluster.event_delay,
            network=OFF if self._cluster.network is None else str(self._cluster.network),
            pulled=sum(one.pulled for one in self._pulls),
            pulls_failed=sum(one.failed for one in self._pulls),
            prefill=self._cluster.prefill,
            handed_over=self._counts["handed_over"],
            combined=0 if self._segments is None else self._segments.counts["combined"],
            segments_apart=0 if self._segments is None else self._segments.counts["segments_apart"],
            workers=tuple(worker.share for worker in self.workers),
            **{name: self._counts[name] for name in names},
        )

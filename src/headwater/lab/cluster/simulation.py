"""Simulated cluster: the lab's servers behind the real router's rules, under one virtual clock.

Messages between router and workers take no time, except events, which take the given delay. Reports of queues are
always up to date.

A failed worker stops computing. The router notices that after its timeout, as the real one does, and assigns the
requests to others: an answer continues after the sent tokens. A worker with an empty cache replaces the failed one.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count

from headwater.account import CacheAccount, Reason
from headwater.cluster.assigning import MAX_ATTEMPTS, Selection
from headwater.cluster.cost import Role
from headwater.cluster.disaggregation import Prefilled, kept
from headwater.cluster.messages import Digests
from headwater.cluster.preparing import Preparing
from headwater.cluster.routed import in_memory
from headwater.cluster.router import HEARTBEAT_TIMEOUT_SECONDS
from headwater.errors import ConfigError
from headwater.events import TokenEvent
from headwater.lab.cluster.pulls import SimulatedPulls
from headwater.lab.cluster.rivals import make_choice
from headwater.lab.cluster.worker import Inbox, Sent, SimulatedWorker, Visit, roles, visit_of
from headwater.lab.replay import result_of, timed
from headwater.lab.row import Result, Routing
from headwater.lab.serving import Engine, Lost
from headwater.lab.setup import Cluster, Setup, as_reused
from headwater.lab.tally import WORKERS_LOST, Ideal, Resent, SegmentWork, Tally
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Request, Trace

KEY = b"simulated"
END, ARRIVAL, BEGIN, FAILURE, LOSS, JOIN = range(6)  # kinds of events, in their order at one time


def simulate(trace: Trace, setup: Setup, arrivals: Arrivals, engine: Engine | None = None, workers: int = 0) -> Result:
    """Replay `trace` as it arrives at a cluster. `workers` is not used.

    Raises ConfigError if memory and model do not fit, or the router's rule is unknown.
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


class Simulation:
    """One run; `run` returns when the last request is answered."""

    def __init__(self, trace: Trace, setup: Setup, cluster: Cluster, arrivals: Arrivals, engine: Engine) -> None:
        self._trace, self._setup, self._cluster, self._arrivals = trace, setup, cluster, arrivals
        layout = setup.layout(trace)
        self._digests = Digests(KEY, layout.unit_bytes)
        self._turns = Counter(request.session for request in trace.requests)
        self._counts: Counter[str] = Counter()
        self._lost: dict[int, dict[int, Lost]] = {}  # requests of failed workers, until the router notices
        self._now = 0.0
        self._events: list[tuple[float, int, int]] = []  # (time, kind, worker)
        self._ids = count(1)
        self._visits: dict[int, Visit] = {}  # composed requests that wait, by the router's numbers
        self._open: dict[int, Visit] = {}  # by the identity of the request that its worker got
        self._engine, self._random = engine, random.Random(f"failures {engine.seed}")
        self.workers: list[SimulatedWorker] = []  # including failed ones
        self._serving: list[SimulatedWorker] = []  # those that the router believes to serve
        self._named: dict[bytes, SimulatedPulls] = {}  # memories of workers, by their names
        self._unassigned: list[Visit] = []  # requests that no worker can accept now
        self._preparing = Preparing(self._ids, lambda routed: self._place(self._visits.pop(routed.id)), self._counts)
        rule, states = make_choice(cluster.router), setup.profile.state
        self._selection = Selection(KEY, rule, states, self._preparing, self._counts)
        self._ideal = Ideal(trace, layout.unit_tokens)
        self._total = Tally(layout.flops, len(arrivals), SegmentWork(layout.flops))
        for role in roles(cluster):
            self._join(role)

    def run(self) -> Tally:
        happened = {
            END: self._end,
            BEGIN: self._begin,
            FAILURE: self._fail,
            LOSS: self._lose,
            JOIN: self._replace,
        }
        while True:
            due, event = self._arrivals.due(), self._events[0] if self._events else None
            if due is not None and (event is None or (due, ARRIVAL) < event[:2]):
                self._route(self._arrivals.take(), due)
            elif event is not None:
                at, kind, n = heapq.heappop(self._events)
                happened[kind](at, n)
            else:
                return self._summed()

    def _join(self, role: Role) -> None:
        """Add a worker with an empty cache."""
        n, cluster, arrivals = len(self.workers), self._cluster, self._arrivals
        given = self._trace, self._setup, self._engine, self._digests
        worker = SimulatedWorker(n, role, *given, lambda: self._now, self._ordered)
        worker.serving.now = self._now
        tally = Tally(
            worker.layout.flops,
            len(arrivals),
            worker.serving.segment_work,
            outcomes=self._total.outcomes,
            token_seconds=self._total.token_seconds,
            added=partial(self._begun, worker),
            is_counted=partial(self._is_counted, worker),
        )
        worker.watch(Inbox(arrivals.due, partial(self._answered, worker)), tally, self._ideal)
        worker.named = self._named
        if cluster.network is not None:
            evicts = partial(self._may_evict, worker)
            worker.pulls = SimulatedPulls(n, cluster.network, worker.serving, lambda: self._now, evicts)
            self._named[worker.incarnation] = worker.pulls
        worker.publish_store()
        self.workers.append(worker)
        self._serving.append(worker)
        if cluster.failures is not None:
            fails = self._now + self._random.expovariate(1 / cluster.failures.every)
            heapq.heappush(self._events, (fails, FAILURE, n))

    # -- workers that fail

    def _fail(self, at: float, n: int) -> None:
        """Fail a worker, unless all requests are answered."""
        if not (len(self._arrivals) or self._open or self._visits or self._unassigned):
            return
        self._now, worker = at, self.workers[n]
        assert self._cluster.failures is not None, "workers fail only then"
        self._counts["failed"] += 1
        self._lost[n] = worker.fail()
        if worker.pulls is not None:
            worker.pulls.is_lost = True
        heapq.heappush(self._events, (at + HEARTBEAT_TIMEOUT_SECONDS, LOSS, n))
        heapq.heappush(self._events, (at + self._cluster.failures.absent, JOIN, n))

    def _lose(self, at: float, n: int) -> None:
        """Assign the requests of a failed worker to others, once the router has noticed the failure."""
        self._now, worker, lost = at, self.workers[n], self._lost.pop(n)
        self._serving.remove(worker)
        for pulls in self.pulls:
            if pulls.follows_any:
                pulls.look()
        self._preparing.lost(worker)
        for visit in self._open.values():
            if visit.routed.follower is worker:
                visit.unfollow()
        moved = [(request, self._open.pop(request)) for request in worker.open]
        for _, visit in moved:
            if not visit.routed.prefills:
                self._selection.choice.ended(visit.prompt, worker.name)
        self._selection.choice.left(worker.name)
        for request, visit in moved:
            visit.lost, visit.failures = lost.get(request, visit.lost), visit.failures + 1
            visit.unfollow()
            if visit.failures >= MAX_ATTEMPTS:
                self._give_up(visit)
                continue
            self._counts["resumed" if visit.first_token is not None else "moved"] += 1
            self._place(visit)

    def _give_up(self, visit: Visit) -> None:
        """End a request with an error, after MAX_ATTEMPTS failed workers."""
        self._counts["given_up"] += 1
        if visit.first_token is None:
            known = Resent() if visit.lost is None else visit.lost.sent
            self._total.add(visit.request, None, known, visit.routed.began, error=WORKERS_LOST)
        self._arrivals.answered(visit.request, self._now)

    def _replace(self, at: float, n: int) -> None:
        """Replace a failed worker by another one."""
        self._now = at
        self._join(self.workers[n].role)
        unassigned, self._unassigned = self._unassigned, []
        for visit in unassigned:
            self._place(visit)

    # -- requests and work

    def _ordered(self, n: int) -> None:
        """Let a worker handle an order now, or at the end of its step."""
        worker = self.workers[n]
        if worker.serving.work is None:
            if worker.wakes is None or worker.wakes > self._now:
                self._wake(worker, self._now)
        else:
            worker.serving.shorten(self._now)
            heapq.heappush(self._events, (worker.serving.ends, END, n))

    def _route(self, request: Request, now: float) -> None:
        """Route a request that arrives now."""
        self._now = now
        has_turns = self._turns[request.session] > 1
        self._place(visit_of(request, self._trace, self._setup, self._digests, next(self._ids), now, has_turns))

    def _place(self, visit: Visit) -> None:
        """Send a request to a worker: a new, a prefilled or a failed one, or one with prepared segments."""
        now, routed = self._now, visit.routed
        if not self._serving:
            self._unassigned.append(visit)
            return
        self._visits[routed.id] = visit
        selected = self._selection.select(routed, visit.prompt, self._serving)
        if selected is None:  # its segments are prepared first
            return
        del self._visits[routed.id]
        request, worker, routed.loads = visit.sent, selected.link, selected.is_loaded
        predicted = selected.predicted
        self._open[id(request)] = visit
        matched = worker.match(request, visit.composed)
        self._counts["expected_loads"] += routed.loads
        self._counts["as_predicted" if matched == predicted else "less" if matched < predicted else "more"] += 1
        if worker.pulls is not None:
            worker.pulls.name(request, [one.pulls for one in selected.holders if one.pulls is not None], visit.followed)
        came = now if visit.first_token is not None else routed.began
        if visit.lost is not None:
            worker.serving.resume(request, visit.lost)
        worker.receive(request, Sent(selected.outstanding, came, predicted, matched), now)
        if worker.serving.work is not None:
            heapq.heappush(self._events, (worker.serving.ends, END, worker.number))  # it may end sooner now
        elif worker.wakes is None or worker.wakes > now:  # it waits for a tier
            self._wake(worker, now)
        if selected.decoder is not None:
            self._follow(visit, worker, selected.decoder)

    def _follow(self, visit: Visit, prefilling: SimulatedWorker, decoder: SimulatedWorker) -> None:
        """Let the worker that will decode an answer read the prompt while the other one prefills it."""
        assert prefilling.pulls is not None, "prompts are prefilled apart only where they are pulled"
        assert decoder.pulls is not None, "likewise"
        prompt, visit.routed.follower = visit.prompt, decoder
        namespace = visit.request.namespace
        visit.followed = decoder.pulls.follow_prefill(prefilling.pulls, namespace, visit.key, prompt.tokens)
        self._wake_for_reads(decoder)

    def _wake_for_reads(self, worker: SimulatedWorker) -> None:
        """Wake an idle worker when the next parts that it reads are there."""
        due = None if worker.pulls is None else worker.pulls.due()
        if due is not None and worker.serving.work is None and (worker.wakes is None or worker.wakes > due):
            self._wake(worker, max(self._now, due))

    def _may_evict(self, worker: SimulatedWorker) -> None:
        """Wake a worker that may wait for memory, and can evict a prefix that it has sent."""
        if worker.serving.work is None:
            self._wake(worker, self._now)

    def _wake(self, worker: SimulatedWorker, at: float) -> None:
        worker.wakes = at
        heapq.heappush(self._events, (at, BEGIN, worker.number))

    def _end(self, at: float, n: int) -> None:
        worker = self.workers[n]
        if worker.serving.work is None or worker.serving.ends != at:
            return  # the work ended sooner
        self._now = at
        worker.end()
        self._wake(worker, at)
        self._look(worker)

    def _begin(self, at: float, n: int) -> None:
        worker = self.workers[n]
        if worker.wakes != at or worker.has_failed:
            return  # it was woken earlier, or has failed
        worker.wakes, self._now = None, at
        self._begin_work(at, worker)
        self._look(worker)

    def _begin_work(self, at: float, worker: SimulatedWorker) -> None:
        ends = worker.begin(at)
        if ends is not None:
            heapq.heappush(self._events, (ends, END, worker.number))
            return
        store = worker.serving.tiers
        if store is not None and (read := store.due()) is not None:
            self._wake(worker, max(at, read))
        elif not worker.serving.scheduler.idle:  # as one server does it: again when the next request comes
            due = self._arrivals.due()
            self._wake(worker, at if due is None else max(at, due))

    def _look(self, worker: SimulatedWorker) -> None:
        """Handle the ends of a worker's orders, and let others read its prefills."""
        for message in worker.take_ended():
            self._preparing.prepared(message)
        for one in self.workers:
            if one.pulls is not None and one.pulls.follows_any:
                one.pulls.look()
                self._wake_for_reads(one)

    # -- ends of requests

    def _begun(self, worker: SimulatedWorker, request: Request, account: CacheAccount | None) -> None:
        visit = self._open[id(request)]
        prefills = visit.routed.prefills
        if prefills:
            self._total.outcomes[-1] = replace(self._total.outcomes[-1], output_tokens=visit.request.output_tokens)
        sent = worker.first_token(request)
        visit.first_token = self._now
        if not prefills:  # else the rule has not chosen its worker
            self._selection.choice.begun(visit.prompt, worker.name)
        if account is not None:
            visit.routed.count_reads(account, self._counts)
        unit = worker.layout.unit_tokens  # events announce whole units
        resumed = 0 if account is None else in_memory(account) // unit * unit
        if resumed != sent.matched:
            self._counts["lost_waiting" if resumed < sent.matched else "gained_waiting"] += 1

    def _is_counted(self, worker: SimulatedWorker, request: Request) -> bool:
        """Return whether a request was counted at another worker, which has prefilled it or has failed after that."""
        visit = self._open[id(request)]
        if visit.first_token is None:
            return False
        self._selection.choice.begun(visit.prompt, worker.name)
        return True

    def _answered(self, worker: SimulatedWorker, request: Request, now: float) -> None:
        visit = self._open.pop(id(request))
        routed = visit.routed
        if routed.prefilled is not None:
            self._keep_answer(visit, worker)
        worker.answered(request, now)
        if routed.prefills:
            self._counts["handed_over"] += 1
            self._now = now
            account = CacheAccount(request.prompt_tokens, 0, 0, 0, Reason.COLD)  # not used
            routed.prefilled, routed.sent = Prefilled(worker.name, account, None), [TokenEvent(0, "")]
            self._ideal.hit(visit.request)  # its answer is known from now on
            self._place(visit)
            return
        if (routed.prefilled is not None or visit.lost is not None) and request.output_tokens > 1:
            assert visit.first_token is not None, "it is answered"  # by two workers, with the time between them
            self._total.token_seconds[-1] = (now - visit.first_token) / (request.output_tokens - 1)
        self._selection.choice.ended(visit.prompt, worker.name)
        self._arrivals.answered(visit.request, now)

    def _keep_answer(self, visit: Visit, worker: SimulatedWorker) -> None:
        """Let a handed-over answer be prefilled where that costs least."""
        request = as_reused(visit.request, self._setup.reuse)
        answer = kept(visit.prompt, request.known_tokens)
        if answer is None or request.ended:
            return
        keeper = self._selection.keeper(visit.routed, answer, worker.name, self._serving)
        if keeper is not None:
            keeper.keep_answer(request, answer.tokens)
            self._ordered(keeper.number)

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
    def pulls(self) -> list[SimulatedPulls]:
        """Pulls of all workers, if they pull."""
        return [worker.pulls for worker in self.workers if worker.pulls is not None]

    @property
    def routing(self) -> Routing:
        """Requests by worker, and by outcome of predictions."""
        shares, pulls = [worker.share for worker in self.workers], self.pulls
        return Routing.of(
            self._cluster,
            self._counts,
            shares,
            pulled=sum(one.pulled for one in pulls),
            followed=sum(one.followed for one in pulls),
            pulls_failed=sum(one.failed for one in pulls),
        )

"""Requests one by one in the order of their arrival: the hits of a policy, apart from any load."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.order.future import Asked, Future
from headwater.errors import ConfigError, OutOfPages, RequestTooLarge
from headwater.lab.replayed import Replayed
from headwater.lab.setup import Setup, as_reused
from headwater.lab.tally import Ideal, SegmentWork, Tally
from headwater.lab.tuner import TraceTuning, prefill
from headwater.schedule.limits import Limits
from headwater.schedule.planner import Planner
from headwater.traces.arrivals import Arrivals, in_order
from headwater.traces.request import Request, Trace


class OneByOne:
    """Requests one after the other: a prompt's prefill is one leg, its answer's another."""

    def __init__(self, trace: Trace, cache: PrefixCache, planner: Planner) -> None:
        self._trace, self._cache, self._planner = trace, cache, planner
        self._ids = 0

    def serve(self, request: Request) -> CacheAccount | None:
        """Its prompt, and what was answered as far as it is known. None: it does not fit into the memory at all."""
        seq = Replayed(self._next_id(), self._trace, request)
        if not prefill(self._planner, self._cache, seq):
            return None
        keeps = self._planner.keeps_answers and seq.generation.keep_output
        end = seq.answer_end(self._cache.layout.unit_tokens) if keeps else None
        if end is not None:
            prefill(self._planner, self._cache, seq.answer(self._next_id(), end))
        return seq.account

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids


ENDLESS = 1 << 60


class Scheduled:
    """Each has the whole machine: steps are as long as they need to be, and its answer takes none."""

    def __init__(self, trace: Trace, setup: Setup, cache: PrefixCache) -> None:
        self._trace, self._reuse = trace, setup.reuse
        limits = Limits(1, ENDLESS, ENDLESS, ENDLESS, ENDLESS, ENDLESS)
        self.scheduler = setup.scheduler(cache, limits)
        self.work = SegmentWork(cache.layout.flops)
        self.last = 0  # id of the request that was served last

    def serve(self, request: Request) -> CacheAccount | None:
        """Its prompt, and what was answered as far as it is known. None: it does not fit into the memory at all."""
        seq = Replayed(self.scheduler.new_id(), self._trace, as_reused(request, self._reuse))
        self.last = seq.id
        try:
            self.scheduler.enqueue(seq)
        except RequestTooLarge:
            return None
        while not self.scheduler.idle:
            step = self.scheduler.plan_step()
            self.work.note(step)
            for done in self.scheduler.finish_step(step):
                self.scheduler.finish(done)
            for failed, error in self.scheduler.failures:
                if not isinstance(error, OutOfPages):
                    raise error
                if failed is seq:
                    seq.account = None
            self.scheduler.failures.clear()
        return seq.account


def run_one_by_one(trace: Trace, setup: Setup, arrivals: Arrivals, workers: int = 0) -> tuple[Tally, PrefixCache]:
    """All requests to the end of `arrivals`, whose answers take no time. `workers`: processes of Marconi's tuner.

    Where requests are made of segments the scheduler takes them; otherwise the planner alone does the same, sooner.
    """
    if trace.has_segments:
        return _run_scheduled(trace, setup, arrivals, workers)
    layout = setup.layout(trace)
    cache = setup.cache(layout)
    planner = setup.planner(cache)
    alone, ideal = OneByOne(trace, cache, planner), Ideal(trace, layout.unit_tokens)
    tuning = TraceTuning(trace, cache, planner.placement, planner.keeps_answers, workers)
    order = list(in_order(arrivals))
    if isinstance(cache.policy, Clairvoyant):
        cache.policy.foresee(_future(trace, cache, [request for _, request in order]))
    tally = Tally(layout.flops, len(order), SegmentWork(layout.flops))
    for number, (at, request) in enumerate(order):
        if isinstance(cache.policy, Clairvoyant):
            cache.policy.now_at(number)
        tally.add(request, alone.serve(request), ideal.hit(request), at)
        tally.sample(cache)
        tuning.completed(request)
    tuning.close()
    return tally, cache


def _run_scheduled(trace: Trace, setup: Setup, arrivals: Arrivals, workers: int) -> tuple[Tally, PrefixCache]:
    cache = setup.cache(setup.layout(trace))
    if isinstance(cache.policy, Clairvoyant):
        raise ConfigError("eviction 'clairvoyant' knows what prefixes are asked for, and nothing of segments")
    alone, ideal = Scheduled(trace, setup, cache), Ideal(trace, cache.layout.unit_tokens)
    tuning = TraceTuning(trace, cache, alone.scheduler.placement, setup.keeps_answers, workers)
    tally = Tally(cache.layout.flops, len(arrivals), alone.work)
    for at, request in in_order(arrivals):
        account = alone.serve(request)
        tally.add(request, account, ideal.hit(request), at, saved=alone.work.of(alone.last))
        tally.sample(cache)
        tuning.completed(request)
    tuning.close()
    return tally, cache


def _future(trace: Trace, cache: PrefixCache, order: Sequence[Request]) -> Future:
    unit = cache.layout.unit_tokens
    asked = (
        Asked(request.namespace, trace.key(request, request.known_tokens), max(0, request.prompt_tokens - 1) // unit)
        for request in reversed(order)
    )
    return Future(cache.layout.unit_bytes, asked)

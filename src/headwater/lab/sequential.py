"""Requests one by one in the order of their arrival: the hits of a policy, apart from any load."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.order.future import Asked, Future
from headwater.errors import ConfigError, OutOfPages, RequestTooLarge
from headwater.lab.replayed import OneByOne, Replayed
from headwater.lab.setup import Setup, as_reused
from headwater.lab.tally import Ideal, SegmentWork, Tally
from headwater.lab.tuner import TraceTuning
from headwater.schedule.limits import Limits
from headwater.traces.arrivals import Arrivals, in_order
from headwater.traces.request import Request, Trace

ENDLESS = 1 << 60


class Scheduled:
    """The server's scheduler with one request at a time, which builds segments before it composes them.

    Steps have no limit, and answers take none.
    """

    def __init__(self, trace: Trace, setup: Setup, cache: PrefixCache) -> None:
        self._trace, self._reuse = trace, setup.reuse
        limits = Limits(1, ENDLESS, ENDLESS, ENDLESS, ENDLESS, ENDLESS)
        self.scheduler = setup.scheduler(cache, limits)
        self.placement, self.work = self.scheduler.placement, SegmentWork(cache.layout.flops)
        self.last = 0  # id of the latest request

    def serve(self, request: Request) -> CacheAccount | None:
        """Serve the prompt, and the known part of the answer. Return None if the whole memory is too small."""
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
    """Replay all requests of `arrivals`, whose answers take no time. workers: processes of Marconi's tuner.

    The planner alone gives the scheduler's results in less time, but prompts made of segments need the scheduler.
    """
    layout = setup.layout(trace)
    cache = setup.cache(layout)
    if trace.has_segments and isinstance(cache.policy, Clairvoyant):
        raise ConfigError("eviction 'clairvoyant' knows the prefixes of future requests, but not their segments")
    alone: OneByOne | Scheduled
    if trace.has_segments:
        alone = Scheduled(trace, setup, cache)
    else:
        alone = OneByOne(trace, cache, setup.planner(cache))
    tuning = TraceTuning(trace, cache, alone.placement, setup.keeps_answers, workers)
    order = list(in_order(arrivals))
    if isinstance(cache.policy, Clairvoyant):
        cache.policy.foresee(_future(trace, cache, [request for _, request in order]))
    tally, ideal = Tally(layout.flops, len(order), alone.work), Ideal(trace, layout.unit_tokens)
    for number, (at, request) in enumerate(order):
        if isinstance(cache.policy, Clairvoyant):
            cache.policy.now_at(number)
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

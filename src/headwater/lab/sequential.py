"""Requests one by one, in the order in which they come: what a policy would hit, apart from any load."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.cache import PrefixCache
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.order.future import Asked, Future
from headwater.errors import ConfigError
from headwater.lab.ideal import Ideal
from headwater.lab.one_by_one import OneByOne
from headwater.lab.scheduled import Scheduled
from headwater.lab.segment_work import SegmentWork
from headwater.lab.setup import Setup
from headwater.lab.tally import Tally
from headwater.lab.tuning import TraceTuning
from headwater.traces.arrivals import Arrivals, in_order
from headwater.traces.request import Request, Trace


def run_one_by_one(trace: Trace, setup: Setup, arrivals: Arrivals, workers: int = 0) -> tuple[Tally, PrefixCache]:
    """All requests to the end of `arrivals`, whose answers take no time. `workers`: processes of Marconi's tuner.

    Where requests are made of segments the scheduler takes them; otherwise the planner alone does the same, sooner.
    """
    if trace.has_segments:
        return _run_scheduled(trace, setup, arrivals, workers)
    layout = setup.layout(trace)
    cache = setup.cache(layout)
    planner = setup.planner(cache, layout)
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

"""Replays of a trace: one request at a time or under a virtual clock, with one setup or with many in processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from typing import Protocol

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.eviction.clairvoyant.future import Asked, Future
from headwater.cache.stats import CacheStats
from headwater.errors import ConfigError, HeadwaterError, OutOfPages, RequestTooLarge
from headwater.lab.row import Result, Row, Segments, Spread
from headwater.lab.serving import Engine, Serving, TraceTuning
from headwater.lab.setup import Setup, as_reused
from headwater.lab.tally import Ideal, SegmentWork, Tally
from headwater.machine import peak_memory, usable_cores
from headwater.schedule.limits import Limits
from headwater.schedule.replayed import OneByOne, Replayed
from headwater.setting import OFF
from headwater.traces.arrivals import Arrivals, in_order
from headwater.traces.request import Request, Trace

ENDLESS = 1 << 60


def replay(trace: Trace, setup: Setup, arrivals: Arrivals, engine: Engine | None = None, workers: int = 0) -> Result:
    """Replay `trace` as it arrives: under a virtual clock with an engine, one request at a time without.

    `workers` are processes that Marconi's tuner may use; 0: none.
    Raises ConfigError if memory and model do not fit.
    """
    begin = time.process_time()
    if engine is None:
        tally, cache = _one_by_one(trace, setup, arrivals, workers)
        return result_of(trace, setup, tally, [cache], time.process_time() - begin)
    serving = Serving(trace, setup, engine, workers)
    tally = serving.run(arrivals)
    result = result_of(trace, setup, tally, [serving.cache], time.process_time() - begin)
    return timed(result, [serving])


def result_of(trace: Trace, setup: Setup, tally: Tally, caches: Sequence[PrefixCache], seconds: float) -> Result:
    """Return the result of a run that took `seconds` of a processor, with the sums of all caches."""
    segments = _segments(setup, tally, caches) if trace.has_segments else None
    row = _row(setup, tally, caches, seconds, segments)
    return Result(
        row=replace(
            row,
            speculation=OFF if setup.speculation is None else str(setup.speculation),
            tpot_ms=Spread.of(tally.token_seconds),
            tier=OFF if setup.tier is None else str(setup.tier),
            hints=OFF if setup.hints is None else str(setup.hints),
            reported_hit_rate=trace.reported_hit_rate,
        ),
        outcomes=tuple(tally.outcomes),
        held=tuple(tally.held),
        page_bytes=setup.memory // caches[0].layout.n_pages,
        reuse=_reuse(caches),
    )


def timed(result: Result, servings: Sequence[Serving]) -> Result:
    """Return the result with the sums of all servers' figures under a clock."""
    schedulers = [serving.scheduler for serving in servings]
    last = max(serving.now for serving in servings)
    stores = [one.tiers.store for one in servings if one.tiers is not None and one.tiers.store is not None]
    row = replace(
        result.row,
        queue_depth=round(sum(serving.waited for serving in servings) / last, 4) if last else 0.0,
        accepted_drafts=sum(one.speculation.accepted for one in schedulers),
        rejected_drafts=sum(one.speculation.rejected for one in schedulers),
        loaded_tokens=sum(one.tiers.figures().loaded_tokens for one in schedulers),
        tier_peak_bytes=sum(store.peak_bytes for store in stores),
        tier_written_bytes=sum(store.written_bytes for store in stores),
    )
    return replace(result, row=row)


def _reuse(caches: Sequence[PrefixCache]) -> dict[int, int]:
    """Return checkpoints by the number of requests that resumed there."""
    found: Counter[int] = Counter()
    for cache in caches:
        found.update(cache.reuse())
    return dict(found)


def _summed(caches: Sequence[PrefixCache]) -> CacheStats:
    """Return the sums of all caches' figures."""
    stats = [asdict(cache.stats()) for cache in caches]
    return CacheStats(**{name: sum(one[name] for one in stats) for name in stats[0]})


def _segments(setup: Setup, tally: Tally, caches: Sequence[PrefixCache]) -> Segments:
    stats, page_bytes = _summed(caches), setup.memory // caches[0].layout.n_pages
    return Segments(
        reuse=setup.reuse,
        eviction=setup.segment_eviction,
        prefix_tokens=tally.sum("resumed_at"),
        composed_tokens=tally.sum("composed_tokens"),
        seam_tokens=tally.sum("seam_tokens"),
        made_tokens=tally.work.made_tokens,
        uses=stats.segment_uses,
        stored=stats.segments,
        bytes=stats.pages_segment * page_bytes,
        evicted=stats.evicted_segments,
    )


def _row(setup: Setup, tally: Tally, caches: Sequence[PrefixCache], seconds: float, segments: Segments | None) -> Row:
    stats, reuse = _summed(caches), _reuse(caches)
    prompt_tokens, hit_tokens = tally.sum("prompt_tokens"), tally.hit_tokens
    prompts = max(1, prompt_tokens)
    high = [one for one in tally.outcomes if one.priority > 0]
    high_tokens = max(1, sum(one.prompt_tokens for one in high))
    return Row(
        memory=setup.memory,
        pool=setup.pool,
        placement=setup.placement,
        eviction=setup.eviction,
        requests=len(tally.outcomes),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        token_hit_rate=round(hit_tokens / prompts, 6),
        ideal_hit_rate=round(tally.sum("ideal") / prompts, 6),
        stranded_tokens=tally.sum("stranded_tokens"),
        recomputed_tokens=tally.sum("recomputed_tokens"),
        tails=bool(caches[0].layout.tail_pages),
        flops_saved=tally.flops_saved,
        flops_saved_share=round(tally.flops_saved / max(1.0, tally.flops_all), 6),
        checkpoints_taken=stats.saved_checkpoints,
        checkpoints_hit=sum(count for hits, count in reuse.items() if hits),
        evictions=stats.evictions_by_kind(),
        misses_by_reason=dict(sorted(Counter(one.reason for one in tally.outcomes).items())),
        ttft_ms=Spread.of([outcome.ttft for outcome in tally.outcomes if outcome.ttft is not None]),
        queue_depth=None,
        alpha=getattr(caches[0].policy, "alpha", None),
        seconds=round(seconds, 3),
        peak_rss_mb=round(peak_memory() / 1e6, 1),
        segments=segments,
        high_hit_rate=round(sum(one.hit_tokens for one in high) / high_tokens, 6) if high else None,
    )


# -- one request at a time, in the order of arrival: the hits of a policy, apart from any load ------


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


def _one_by_one(trace: Trace, setup: Setup, arrivals: Arrivals, workers: int = 0) -> tuple[Tally, PrefixCache]:
    """Replay all requests of `arrivals`, whose answers take no time. workers: processes of Marconi's tuner.

    Without segments the planner gives the scheduler's results in less time.
    """
    layout = setup.layout(trace)
    now = 0.0
    cache = setup.cache(layout, clock=lambda: now)
    if trace.has_segments and isinstance(cache.policy, Clairvoyant):
        raise ConfigError("eviction 'clairvoyant' knows the prefixes of future requests, but not their segments")
    single: OneByOne | Scheduled
    if trace.has_segments:
        single = Scheduled(trace, setup, cache)
        work = single.work
    else:
        single, work = OneByOne(trace, cache, setup.planner(cache)), SegmentWork(layout.flops)
    tuning = TraceTuning(trace, cache, single.placement, setup.keeps_answers, workers)
    order = list(in_order(arrivals))
    if isinstance(cache.policy, Clairvoyant):
        cache.policy.foresee(_future(trace, cache, [request for _, request in order]))
    tally, ideal = Tally(layout.flops, len(order), work), Ideal(trace, layout.unit_tokens)
    for number, (now, request) in enumerate(order):
        if isinstance(cache.policy, Clairvoyant):
            cache.policy.now_at(number)
        account = single.serve(request)
        tally.add(request, account, ideal.hit(request), now, saved=work.of(single.last))
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


# -- many setups ---------------------------------------------------------------

NewArrivals = Callable[[Trace], Arrivals]  # every row needs its own: they are used up


class Run(Protocol):
    """Replay of one row: `replay`, or one with several workers."""

    def __call__(
        self, trace: Trace, setup: Setup, arrivals: Arrivals, engine: Engine | None = None, workers: int = 0
    ) -> Result: ...


_job: tuple[Trace, NewArrivals, Engine | None, Run] | None = None  # inherited by forked processes


def run_grid(
    trace: Trace,
    setups: Sequence[Setup],
    arrivals: NewArrivals,
    engine: Engine | None = None,
    jobs: int = 0,
    run: Run | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield (number of the setup, its result) as they complete. jobs: processes; 0: one a core. run: None is `replay`.

    An error of a row is raised here; rows that were yielded before are complete.
    """
    jobs, run = min(len(setups), jobs or usable_cores()), run or replay
    if jobs <= 1:
        for number, setup in enumerate(setups):
            given = hinted(trace, setup)
            yield number, run(given, setup, arrivals(given), engine, workers=usable_cores())
        return
    global _job
    _job = trace, arrivals, engine, run
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"), max_tasks_per_child=None)
    try:
        futures = {pool.submit(_run, setup): number for number, setup in enumerate(setups)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise HeadwaterError(f"one of {jobs} processes was killed, perhaps for lack of memory: try fewer") from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)  # its thread would print an error if the interpreter ended before it
        _job = None


def hinted(trace: Trace, setup: Setup) -> Trace:
    """Return the trace whose requests carry the setup's hints."""
    return trace if setup.hints is None else setup.hints.given(trace)


def _run(setup: Setup) -> Result:
    assert _job is not None, "the job was set before the processes were forked"
    trace, arrivals, engine, run = _job
    given = hinted(trace, setup)
    return run(given, setup, arrivals(given), engine)

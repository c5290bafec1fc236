"""Replays of a trace under one setup, or under many in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from headwater.cache import PrefixCache
from headwater.errors import HeadwaterError
from headwater.lab.row import Result, Row, Segments, Spread
from headwater.lab.sequential import run_one_by_one
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.lab.tally import Tally
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Trace


def replay(trace: Trace, setup: Setup, arrivals: Arrivals, engine: Engine | None = None, workers: int = 0) -> Result:
    """Replay `trace` as it arrives: under a virtual clock with an engine, one request at a time without.

    `workers` are processes that Marconi's tuner may use; 0: none.
    Raises ConfigError if memory and model do not go together.
    """
    begin = time.process_time()
    if engine is None:
        tally, cache = run_one_by_one(trace, setup, arrivals, workers)
        queue = None
    else:
        serving = Serving(trace, setup, engine, workers)
        tally, cache, queue = serving.run(arrivals), serving.cache, serving.queue_depth
    segments = _segments(setup, tally, cache) if trace.has_segments else None
    return Result(
        row=_row(setup, tally, cache, queue, time.process_time() - begin, segments),
        outcomes=tuple(tally.outcomes),
        held=tuple(tally.held),
        page_bytes=setup.memory // cache.layout.n_pages,
        reuse=cache.reuse(),
    )


def _segments(setup: Setup, tally: Tally, cache: PrefixCache) -> Segments:
    stats = cache.stats()
    return Segments(
        reuse=setup.reuse,
        eviction=setup.segment_eviction,
        prefix_tokens=tally.prefix_tokens,
        composed_tokens=tally.composed_tokens,
        seam_tokens=tally.seam_tokens,
        made_tokens=tally.work.made_tokens,
        uses=stats.segment_uses,
        stored=stats.segments,
        bytes=stats.pages_segment * (setup.memory // stats.pages_total),
        evicted=stats.evicted_segments,
    )


def _row(
    setup: Setup, tally: Tally, cache: PrefixCache, queue: float | None, seconds: float, segments: Segments | None
) -> Row:
    stats, reuse = cache.stats(), cache.reuse()
    prompts = max(1, tally.prompt_tokens)
    return Row(
        memory=setup.memory,
        pool=setup.pool,
        placement=setup.placement,
        eviction=setup.eviction,
        requests=len(tally.outcomes),
        prompt_tokens=tally.prompt_tokens,
        hit_tokens=tally.hit_tokens,
        token_hit_rate=round(tally.hit_tokens / prompts, 6),
        ideal_hit_rate=round(tally.ideal_tokens / prompts, 6),
        stranded_tokens=tally.stranded_tokens,
        flops_saved=tally.flops_saved,
        flops_saved_share=round(tally.flops_saved / max(1.0, tally.flops_all), 6),
        checkpoints_taken=stats.saved_checkpoints,
        checkpoints_hit=sum(count for hits, count in reuse.items() if hits),
        evictions=stats.evictions_by_kind(),
        misses_by_reason=dict(sorted(tally.reasons.items())),
        ttft_ms=Spread.of([outcome.ttft for outcome in tally.outcomes if outcome.ttft is not None]),
        queue_depth=None if queue is None else round(queue, 4),
        alpha=getattr(cache.policy, "alpha", None),
        seconds=round(seconds, 3),
        peak_rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
        segments=segments,
    )


NewArrivals = Callable[[Trace], Arrivals]  # every row needs its own: they are used up

_job: tuple[Trace, NewArrivals, Engine | None] | None = None  # inherited by forked processes


def run_grid(
    trace: Trace, setups: Sequence[Setup], arrivals: NewArrivals, engine: Engine | None = None, jobs: int = 0
) -> Iterator[tuple[int, Result]]:
    """Yield (number of the setup, its result) as they complete. jobs: processes; 0: one a core.

    An error of a row is raised here; rows that were yielded before are complete.
    """
    jobs = min(len(setups), jobs or len(os.sched_getaffinity(0)))
    if jobs <= 1:
        for number, setup in enumerate(setups):
            yield number, replay(trace, setup, arrivals(trace), engine, workers=len(os.sched_getaffinity(0)))
        return
    global _job
    _job = trace, arrivals, engine
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"), max_tasks_per_child=None)
    try:
        futures = {pool.submit(_run, setup): number for number, setup in enumerate(setups)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise HeadwaterError(f"one of {jobs} processes was killed, perhaps for lack of memory: try fewer") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        _job = None


def _run(setup: Setup) -> Result:
    assert _job is not None, "the job was set before the processes were forked"
    trace, arrivals, engine = _job
    return replay(trace, setup, arrivals(trace), engine)

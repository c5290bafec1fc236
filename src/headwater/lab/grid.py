"""Many setups over one trace, in as many processes as there are cores. What is done stays when the rest is stopped."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from headwater.errors import HeadwaterError
from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Trace

NewArrivals = Callable[[Trace], Arrivals]  # every row needs its own: they are used up

_job: tuple[Trace, NewArrivals, Engine | None] | None = None  # what forked processes find in their memory


def run_grid(
    trace: Trace, setups: Sequence[Setup], arrivals: NewArrivals, engine: Engine | None = None, jobs: int = 0
) -> Iterator[tuple[int, Result]]:
    """(number of the setup, its result) as they are done; jobs: processes, 0 is one a core.

    An exception of a row is raised here; rows that were yielded before are complete.
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

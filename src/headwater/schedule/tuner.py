"""Marconi's tuner: search for the alpha that hits most tokens of recent requests (section 4.2, "Managing the balance").

Until the first eviction the tuner counts requests. Then it takes a snapshot of the cache, records the requests that
follow, `multiplier` times as many, and replays them from the snapshot under each alpha of a grid. It adopts the best
alpha and keeps it. If the traffic ends before that, alpha stays 0.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from collections.abc import Sequence as Requests
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.placement.base import Placement
from headwater.cache.snapshot import Snapshot
from headwater.plan import CacheLayout
from headwater.schedule.planner import Planner
from headwater.schedule.replayed import OneByOne
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Sequence
from headwater.traces.request import Request, Trace

ALPHAS = tuple(step / 10 for step in range(21))
SERVED = Trace("served", ())  # token ids, four bytes each

Replay = Callable[[PrefixCache, Placement, Trace], int]  # serves a trace one by one; returns the prompt tokens that hit


def replay_window(cache: PrefixCache, placement: Placement, window: Trace) -> int:
    """Serve the requests one by one; return the prompt tokens that hit."""
    sequential = OneByOne(window, cache, Planner(cache, placement))
    accounts = [sequential.serve(request) for request in window.requests]
    return sum(account.resumed_at for account in accounts if account is not None)


@dataclass(frozen=True, slots=True)
class Study:
    """Inputs of a replay, picklable for another process."""

    layout: CacheLayout
    begin: Snapshot
    placement: Placement  # as it was at the snapshot
    window: Trace  # the recorded requests
    replay: Replay

    def hits(self, eviction: str) -> int:
        """Return the tokens of the window that hit under this policy."""
        return self.replay(PrefixCache(self.layout, eviction, self.begin), copy.deepcopy(self.placement), self.window)


class Tuner:
    """Search for the alpha of a cache whose policy is Marconi's; `observe` takes each request once it is complete.

    A request's known tokens are those that were cached. `trace`: the source of its keys.
    workers: processes that replay; with 0 `observe` itself replays. If `wait` is true, `observe` returns only when the
    result is known, so that the same request always adopts it, and raises a replay's error. Otherwise requests
    continue, a later one adopts the result, and alpha stays 0 if a replay failed.
    """

    def __init__(
        self,
        cache: PrefixCache,
        placement: Placement,
        replay: Replay = replay_window,
        workers: int = 0,
        wait: bool = True,
        trace: Trace = SERVED,
    ) -> None:
        if not isinstance(cache.policy, Marconi):
            raise TypeError(f"{type(cache.policy).__name__} has no alpha to tune")
        self._cache, self._policy, self._placement, self._replay = cache, cache.policy, placement, replay
        self._workers, self._wait, self._trace = workers, wait, trace
        self._requests = 0  # until the first eviction
        self._begin: tuple[Snapshot, Placement] | None = None
        self._window: list[Request] = []
        self._running: Grid | None = None
        self.hits: dict[float, int] = {}  # tokens by alpha, once they are known
        self.failure: BaseException | None = None  # the first error of a replay

    @property
    def done(self) -> bool:
        return bool(self.hits) or self.failure is not None

    def observe(self, request: Request) -> None:
        """Count or record a completed request, and adopt the result if it is known."""
        if self.done:
            return
        if self._running is not None:
            self._adopt_if_ready()
        elif self._begin is None:
            self._requests += 1
            stats = self._cache.stats()
            if stats.evicted_checkpoints or stats.evicted_kv_pages:
                self._begin = self._cache.snapshot(), copy.deepcopy(self._placement)
        else:
            self._window.append(request)
            if len(self._window) == self._policy.multiplier * self._requests:
                self._start(*self._begin)

    def close(self) -> None:
        """Stop replays that still run."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start(self, begin: Snapshot, placement: Placement) -> None:
        window = replace(self._trace, requests=tuple(self._window))
        study = Study(self._cache.layout, begin, placement, window, self._replay)
        spellings = [self._policy.static(alpha) for alpha in ALPHAS]
        if not self._workers:
            self._adopt([study.hits(spelling) for spelling in spellings])
            return
        self._running = Grid(study, spellings, self._workers, fork=self._wait)
        if self._wait:
            self._adopt_if_ready(wait=True)

    def _adopt_if_ready(self, wait: bool = False) -> None:
        assert self._running is not None, "a grid was started"
        if not wait:
            if not self._running.ready:
                return
            self.failure = self._running.failure
        try:
            hits = [] if self.failure else self._running.results()
        finally:
            self.close()
        if hits:
            self._adopt(hits)

    def _adopt(self, hits: list[int]) -> None:
        """Set the best alpha, the smallest of equals; keep 0 if its gain is within the policy's guard."""
        self.hits = dict(zip(ALPHAS, hits, strict=True))
        best = max(ALPHAS, key=lambda alpha: self.hits[alpha])
        prompts = sum(request.prompt_tokens for request in self._window)
        if (self.hits[best] - self.hits[0.0]) * 100 > self._policy.guard * prompts:
            self._policy.alpha = best
        self._begin, self._window = None, []


class Grid:
    """A study under several policies, in processes of its own."""

    def __init__(self, study: Study, spellings: Requests[str], workers: int, fork: bool) -> None:
        # a server has threads: a fork would copy their locks in the locked state
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self._pool = ProcessPoolExecutor(
            workers, context, initializer=_receive, initargs=(pickle.dumps(study), not fork)
        )
        before = set(multiprocessing.active_children())
        self._futures: list[Future[int]] = [self._pool.submit(_hits, spelling) for spelling in spellings]
        self._processes = set(multiprocessing.active_children()) - before

    @property
    def ready(self) -> bool:
        return all(future.done() for future in self._futures)

    @property
    def failure(self) -> BaseException | None:
        """The error of the first replay that failed; waits for all replays."""
        return next((error for future in self._futures if (error := future.exception()) is not None), None)

    def results(self) -> list[int]:
        """Return each policy's hits; wait for missing ones. Raises a replay's error."""
        return [future.result() for future in self._futures]

    def close(self) -> None:
        """Stop at once: the interpreter would wait for a running replay at its exit."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.terminate()


_study: Study | None = None  # of a worker process


def _receive(pickled: bytes, low_priority: bool) -> None:
    global _study
    if low_priority:
        os.nice(10)
    _study = pickle.loads(pickled)


def _hits(spelling: str) -> int:
    assert _study is not None, "a worker receives its study when it starts"
    return _study.hits(spelling)


REPLAY_PROCESSES = 2  # of a server
log = logging.getLogger("headwater.engine")


class ServerTuning:
    """Observer of an engine whose policy is Marconi's: reports each complete answer to the tuner.

    Requests continue while the tuner replays. Its errors are logged, and leave alpha as it is.
    """

    def __init__(self, scheduler: Scheduler, cache: PrefixCache) -> None:
        self._unit, self._keeps_answers = scheduler.layout.unit_tokens, scheduler.decode_reuse != "none"
        self._tuner: Tuner | None = Tuner(cache, scheduler.placement, workers=REPLAY_PROCESSES, wait=False)

    def completed(self, seq: Sequence) -> None:
        if self._tuner is None or self._tuner.done:
            return
        try:
            self._report(self._tuner, seq)
        except Exception as error:
            self._give_up(error)
        else:
            if self._tuner.failure is not None:
                self._give_up(self._tuner.failure)

    def _report(self, tuner: Tuner, seq: Sequence) -> None:
        keeps = self._keeps_answers and seq.generation.keep_output
        known = max(seq.n_prompt, seq.known_tokens // self._unit * self._unit if keeps else 0)
        key = seq.key_until(known) if known > seq.n_prompt else seq.key
        boundaries, namespace = seq.generation.boundaries, seq.namespace
        tuner.observe(Request("", key, seq.n_prompt, 0, known, boundaries=boundaries, namespace=namespace))

    def _give_up(self, error: BaseException) -> None:
        log.error("the tuner of eviction policy marconi has failed; alpha stays as it is", exc_info=error)
        self.close()
        self._tuner = None

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()


def server_tuning(scheduler: Scheduler) -> ServerTuning | None:
    """Return the observer that an engine with this scheduler needs; None if its policy has nothing to tune."""
    cache = scheduler.cache
    if isinstance(cache, PrefixCache) and isinstance(cache.policy, Marconi):
        return ServerTuning(scheduler, cache)
    return None

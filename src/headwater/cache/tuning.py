"""Marconi's tuner: which alpha would have hit most of the recent requests (section 4.2, "Managing the balance").

Until the first eviction it counts requests. Then it takes a snapshot of the cache, notes the requests that follow,
`multiplier` times as many, and has them replayed from the snapshot under each alpha of a grid. The best one is adopted,
once and for all. Where the traffic ends before, alpha stays 0.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from headwater.cache.eviction.marconi import Marconi
from headwater.cache.positions import Placement
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.snapshot import Snapshot
from headwater.plan import CacheLayout
from headwater.request import Boundaries

ALPHAS = tuple(step / 10 for step in range(21))


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was served, as it takes to serve it again. Lengths in tokens."""

    namespace: str
    key: bytes  # of prompt and output, as far as they are cached
    prompt_tokens: int
    known_tokens: int  # that the key stands for, at least prompt_tokens: more where the output is cached
    boundaries: Boundaries = field(default_factory=Boundaries)


Replay = Callable[[PrefixCache, Placement, Sequence[Seen]], int]  # serves them one by one; tokens that were hit


@dataclass(frozen=True, slots=True)
class Study:
    """All that a replay takes; it may travel to another process."""

    layout: CacheLayout
    begin: Snapshot
    placement: Placement  # as it was at the snapshot
    window: tuple[Seen, ...]
    replay: Replay

    def hits(self, eviction: str) -> int:
        """Tokens that the window would have hit."""
        return self.replay(PrefixCache(self.layout, eviction, self.begin), copy.deepcopy(self.placement), self.window)


class Tuner:
    """Watches a cache whose policy is Marconi's: `seen` is told of each request once it is done.

    workers: processes that replay; 0: none, `seen` replays by itself. With `wait` it does not return before the
    result is there, so that the same request always adopts it, and raises what a replay raised; without, requests go
    on, a later one adopts it, and where a replay failed alpha stays 0.
    """

    def __init__(
        self, cache: PrefixCache, placement: Placement, replay: Replay, workers: int = 0, wait: bool = True
    ) -> None:
        if not isinstance(cache.policy, Marconi):
            raise TypeError(f"{type(cache.policy).__name__} has no alpha to tune")
        self._cache, self._policy, self._placement, self._replay = cache, cache.policy, placement, replay
        self._workers, self._wait = workers, wait
        self._requests = 0  # until the first eviction
        self._begin: tuple[Snapshot, Placement] | None = None
        self._window: list[Seen] = []
        self._running: Grid | None = None
        self.hits: dict[float, int] = {}  # tokens by alpha, once they are known
        self.failure: BaseException | None = None  # why they never will be

    @property
    def done(self) -> bool:
        return bool(self.hits) or self.failure is not None

    def seen(self, request: Seen) -> None:
        """A request is done: count it or note it, and adopt a result that is there."""
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
        """Nobody waits for a result any more."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start(self, begin: Snapshot, placement: Placement) -> None:
        study = Study(self._cache.layout, begin, placement, tuple(self._window), self._replay)
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
        hits = [] if self.failure else self._running.results()
        self.close()
        if hits:
            self._adopt(hits)

    def _adopt(self, hits: list[int]) -> None:
        """Take the best alpha, of equals the smallest; unless it gains no more than the guard asks."""
        self.hits = dict(zip(ALPHAS, hits, strict=True))
        best = max(ALPHAS, key=lambda alpha: self.hits[alpha])
        prompts = sum(request.prompt_tokens for request in self._window)
        if (self.hits[best] - self.hits[0.0]) * 100 > self._policy.guard * prompts:
            self._policy.alpha = best
        self._begin, self._window = None, []


class Grid:
    """A study under several policies, in processes of its own."""

    def __init__(self, study: Study, spellings: Sequence[str], workers: int, fork: bool) -> None:
        # a server has threads, whose locks a fork would leave locked for ever
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
        """What the first replay that failed raised; waits for all."""
        return next((error for future in self._futures if (error := future.exception()) is not None), None)

    def results(self) -> list[int]:
        """One a policy; waits for those that are not there. Raises what a replay raised."""
        return [future.result() for future in self._futures]

    def close(self) -> None:
        """Stop at once: a replay that runs would be waited for at the program's end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.terminate()


_study: Study | None = None  # of a worker process


def _receive(pickled: bytes, stand_back: bool) -> None:
    global _study
    if stand_back:
        os.nice(10)
    _study = pickle.loads(pickled)


def _hits(spelling: str) -> int:
    assert _study is not None, "a worker receives its study when it starts"
    return _study.hits(spelling)

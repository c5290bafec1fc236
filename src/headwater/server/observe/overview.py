"""Data of the live page (`/cache`): the cache's memory and tree, the last requests, the last 15 minutes.

It holds numbers, names of closed lists and fingerprints, and no text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool

from headwater.account import Reason
from headwater.cache.view import CacheView, Fingerprints, HotPrefix, NodeView, path_of
from headwater.engine.meter import EngineStats
from headwater.schedule.sequence import key_of
from headwater.server.http.exchange import ServedEngine
from headwater.server.http.middleware import RequestContext
from headwater.server.observe.metrics import computed_by_kind
from headwater.server.observe.record import GenerationEnd, Watcher

MIN_VIEW_SECONDS = 1.0  # for which a view of the tree is reused
MAX_VIEW_SHARE = 0.02  # of the time may be spent on viewing the tree, which holds the engine's lock
MAX_RECENT_REQUESTS = 100
MAX_PREFILLS = 16
MAX_SAMPLES = 900
MAX_TICKS = 8192  # times of the cache's clock that are kept: more than an hour, at one a second
SAMPLE_SECONDS = 1.0  # seconds between two samples
PAGES = ("kv", "checkpoint", "tail", "private", "slot", "segment", "free")
SUMS = ("prompt_tokens", "cached_tokens", "output_tokens")
COLUMNS = ("serial", "time", *PAGES, "dead_kv_tokens", "running", "waiting", *SUMS)
USE_FIELDS = ("age", "pins", "hits", "subtree_tokens", "subtree_nodes", "folded_nodes", "folded_tokens")
NODE_FIELDS = ("id", "parent", "start", "end", "kv_pages", "checkpoint", "speculative", "dead", *USE_FIELDS)

log = logging.getLogger("headwater.server")

Json = dict[str, Any]
Sample = tuple[float, ...]  # in the order of COLUMNS; pages, tokens and requests


class Overview:
    """Data of the live page."""

    def __init__(self, engine: ServedEngine, prefills: Callable[[], list[Json]] = list) -> None:
        """`prefills` returns the long prefills of now."""
        self._prefills = prefills
        self.recent, ticks = Recent(), Ticks()
        self.timeline = Timeline(engine.stats, self.recent, ticks)
        self._engine, self._tree = engine, TreeWatch(engine, ticks)
        self._started = time.time()

    async def since(self, sample: int, request: int, tick: int) -> Json:
        """Return the data, without the samples, requests and tree that the client already has."""
        stats, tree = await run_in_threadpool(self._engine.stats), await self._tree.tree()
        return {
            "started": self._started,
            "time": time.time(),
            "model": self._engine.model_name,
            "memory": _memory(stats, self._engine),
            "tiers": [asdict(tier) for tier in stats.tiers],
            "held": _fields(stats.cache, ("checkpoints", "nodes", "namespaces", "dead_kv_tokens")),
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "prefills": self._prefills()[:MAX_PREFILLS],
            **_fields(stats, ("answers_waiting", "healings_waiting")),
            "since_start": _since_start(stats, self.recent),
            "tree": None if tree["tick"] == tick else tree,
            "requests": self.recent.since(request),
            "timeline": {"columns": COLUMNS, "rows": self.timeline.since(sample)},
        }

    async def path(self, namespace: str, tokens: tuple[int, ...], page_size: int) -> list[int]:
        """Return the ids of the tree's nodes that hold a prompt, from its namespace's root down."""
        await self._tree.tree()
        return path_of(self._tree.view, namespace, key_of(tokens), len(key_of(tokens[:page_size])))


class Recent(Watcher):
    """Ring of the last answers, and sums over all of them."""

    def __init__(self) -> None:
        self._ring: deque[tuple[int, Json]] = deque(maxlen=MAX_RECENT_REQUESTS)
        self._serial = 0
        self.prompts = self.hits = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.reasons: Counter[Reason] = Counter({reason: 0 for reason in Reason})

    def ended(self, end: GenerationEnd) -> None:
        account = end.account
        self.prompts += 1
        self.hits += account.cached_tokens > 0
        self.prompt_tokens += account.prompt_tokens
        self.cached_tokens += account.cached_tokens
        self.output_tokens += end.event.output_tokens
        self.reasons[account.reason] += 1
        self._add(end.as_dict())

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        finish = "cancelled" if error is None else type(error).__name__
        entry = {"request_id": request.id, "endpoint": endpoint, "number": 0, "finish_reason": finish}
        self._add(entry | {"total_seconds": round(request.seconds, 6)})

    def since(self, serial: int) -> list[Json]:
        """Return the entries after the one with that serial, oldest first."""
        return [entry for at, entry in self._ring if at > serial]

    def _add(self, entry: dict[str, object]) -> None:
        self._serial += 1
        self._ring.append((self._serial, {"serial": self._serial, "time": round(time.time(), 3), **entry}))


class Ticks:
    """Times at which the cache's logical clock was seen to have advanced: ages in ticks become times of day."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # the event loop and a thread of its pool both note and read
        self._ticks: list[int] = []  # ascending, without repetition
        self._times: list[float] = []

    def seen(self, tick: int) -> None:
        """Note the current tick. From MAX_TICKS on every other one is dropped: older times become less precise."""
        with self._lock:
            if not self._ticks or tick > self._ticks[-1]:
                self._ticks.append(tick)
                self._times.append(self._clock())
            if len(self._ticks) >= MAX_TICKS:
                self._ticks, self._times = self._ticks[1::2], self._times[1::2]

    def time_of(self, tick: int) -> float:
        """Return the time at which the clock had reached this tick, one not later than the last seen."""
        with self._lock:
            return self._times[min(bisect_left(self._ticks, tick), len(self._times) - 1)]


class Timeline:
    """Ring of samples. Token counts run from the start; all other values are current."""

    def __init__(self, stats: Callable[[], EngineStats], recent: Recent, ticks: Ticks) -> None:
        self._stats, self._recent, self._ticks = stats, recent, ticks
        self._ring: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._serial = 0

    def since(self, serial: int) -> list[Sample]:
        """Return the samples after the one with that serial, oldest first."""
        return [sample for sample in self._ring if sample[0] > serial]

    async def sample(self) -> None:
        """Take a sample. The engine is read on another thread, since its lock may be held while it plans a step."""
        stats = await run_in_threadpool(self._stats)
        self._ticks.seen(stats.cache.tick)
        pages, gauges = stats.cache.pages_by_use(), (stats.cache.dead_kv_tokens, stats.running, stats.waiting)
        sums = _fields(self._recent, SUMS)
        self._serial += 1
        self._ring.append((self._serial, round(time.time(), 3), *pages.values(), *gauges, *sums.values()))

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Take one sample a second until the block ends."""
        task = asyncio.create_task(self._sample_on())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sample_on(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception:  # one failed sample must not end the timeline
                log.exception("a sample failed")
            await asyncio.sleep(SAMPLE_SECONDS)


class TreeWatch:
    """Newest view of the tree, shared by all clients: many of them cost the engine no more than one."""

    def __init__(self, engine: ServedEngine, ticks: Ticks, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._ticks, self._clock = engine, ticks, clock
        self._prints = Fingerprints()
        self._looking = asyncio.Lock()
        self._good_until = 0.0
        self._tree: Json = {}
        self.view = CacheView((), (), 0, 0, 0, 0)  # of the newest tree

    async def tree(self) -> Json:
        """Return the tree, at most a second old, or older if views would take more than MAX_VIEW_SHARE of the time."""
        async with self._looking:
            if self._clock() >= self._good_until:
                started = self._clock()
                self._tree = await run_in_threadpool(self._look)
                now = self._clock()
                self._good_until = now + max(MIN_VIEW_SECONDS, (now - started) / MAX_VIEW_SHARE)
        return self._tree

    def _look(self) -> Json:
        view = self.view = self._engine.view()
        self._ticks.seen(view.now)
        prints = self._prints.of_nodes(view)
        return {
            "tick": view.now,
            **_fields(view, ("total_nodes", "shown_nodes", "walked_nodes")),
            "nodes": [{"fingerprint": prints[node.id], **self._node(node, view.now)} for node in view.nodes],
            "hottest": self._hottest(view),
        }

    def _hottest(self, view: CacheView) -> list[Json]:
        return [
            {
                "fingerprint": self._prints.prefix(hot.namespace, hot.edges),
                "namespace": self._prints.namespace(hot.namespace),
                **_fields(hot, ("id", "tokens", "hits", "age")),
                "used_at": self._used_at(hot, view.now),
            }
            for hot in view.hottest
        ]

    def _node(self, node: NodeView, now: int) -> Json:
        return {**_fields(node, NODE_FIELDS), "used_at": self._used_at(node, now)}

    def _used_at(self, one: NodeView | HotPrefix, now: int) -> float:
        """Return the time of day of its last use, in seconds."""
        return round(self._ticks.time_of(now - one.age), 1)


def _fields(value: object, names: Iterable[str]) -> Json:
    return {name: getattr(value, name) for name in names}


def _memory(stats: EngineStats, engine: ServedEngine) -> Json:
    pages, page_bytes = stats.cache.pages_by_use(), engine.spec.page_bytes
    return {
        "draft_bytes": engine.draft_bytes,
        "mtp_bytes": engine.mtp_bytes,
        "page_bytes": page_bytes,
        "pages": {**pages, "total": stats.cache.pages_total},
        "bytes": {use: count * page_bytes for use, count in pages.items()},
    }


def _since_start(stats: EngineStats, recent: Recent) -> Json:
    cache = stats.cache
    return {
        **_fields(recent, ("prompts", "hits", *SUMS)),
        "hit_rate": recent.cached_tokens / recent.prompt_tokens if recent.prompt_tokens else None,
        "misses": {str(reason): count for reason, count in recent.reasons.items() if reason is not Reason.FULL},
        "full_hits": recent.reasons[Reason.FULL],
        "computed_tokens": computed_by_kind(stats),
        "evictions": cache.evictions_by_kind(),
        "checkpoints_taken": cache.saved_by_kind(),
        "resumes": cache.resumes,
        "healings": stats.healings_by_outcome(),
        "drafts": stats.drafts_by_outcome(),
        **_fields(stats, ("loaded_tokens", "loaded_segments", "copies_dropped")),
        **_fields(stats, ("preemptions", "refused", "expired", "failed_steps")),
    }

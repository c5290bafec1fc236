"""`/cache`: what is held, where the memory goes, the tree by its largest parts, the last requests, the last minutes.

Numbers, names of closed lists and fingerprints: nothing of what anybody said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from headwater.account import Reason
from headwater.cache.view import CacheView, Fingerprints, NodeView
from headwater.engine.stats import EngineStats
from headwater.server.http.refusals import refusals
from headwater.server.observe.metrics import computed_by_kind
from headwater.server.observe.recent import Recent
from headwater.server.observe.timeline import COLUMNS, Timeline
from headwater.server.routes.service import ServedEngine, Service

MIN_AGE = 1.0  # seconds for which a view of the tree is good
MAX_SHARE = 0.02  # of the time may go into looking at the tree, under the engine's lock

Json = dict[str, Any]


class TreeWatch:
    """The newest view of the tree, shared by all who look: a crowd of them costs the engine no more than one."""

    def __init__(self, engine: ServedEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._prints = Fingerprints()
        self._looking = asyncio.Lock()
        self._good_until = 0.0
        self._tree: Json = {}

    async def tree(self) -> Json:
        """The tree, at most a second old, or as old as keeps looking at it below MAX_SHARE of the time."""
        async with self._looking:
            if self._clock() >= self._good_until:
                started = self._clock()
                self._tree = await run_in_threadpool(self._look)
                now = self._clock()
                self._good_until = now + max(MIN_AGE, (now - started) / MAX_SHARE)
        return self._tree

    def _look(self) -> Json:
        view = self._engine.view()
        prints = self._prints.of_nodes(view)
        return {
            "tick": view.now,
            "total_nodes": view.total_nodes,
            "shown_nodes": view.shown_nodes,
            "walked_nodes": view.walked_nodes,
            "nodes": [_node(node, prints[node.id]) for node in view.nodes],
            "hottest": self._hottest(view),
        }

    def _hottest(self, view: CacheView) -> list[Json]:
        return [
            {
                "id": hot.id,
                "fingerprint": self._prints.prefix(hot.namespace, hot.edges),
                "namespace": self._prints.namespace(hot.namespace),
                "tokens": hot.tokens,
                "hits": hot.hits,
                "age": hot.age,
            }
            for hot in view.hottest
        ]


def _node(node: NodeView, fingerprint: str) -> Json:
    return {
        "id": node.id,
        "parent": node.parent,
        "fingerprint": fingerprint,
        "start": node.start,
        "end": node.end,
        "kv_pages": node.kv_pages,
        "checkpoint": node.checkpoint,
        "speculative": node.speculative,
        "dead": node.dead,
        "age": node.age,
        "pins": node.pins,
        "hits": node.hits,
        "subtree_tokens": node.subtree_tokens,
        "subtree_nodes": node.subtree_nodes,
        "folded_nodes": node.folded_nodes,
        "folded_tokens": node.folded_tokens,
    }


def install(app: FastAPI, service: Service, recent: Recent, timeline: Timeline) -> None:
    watch, engine = TreeWatch(service.engine), service.engine
    started = time.time()

    @app.get("/cache", response_model=dict[str, Any], responses=refusals(400, 401))
    async def cache(
        sample: Annotated[int, Query(ge=0, description="The last sample of the timeline that is known already.")] = 0,
        request: Annotated[int, Query(ge=0, description="The last request that is known already.")] = 0,
        tick: Annotated[int, Query(ge=-1, description="The tick of the tree that is known already.")] = -1,
    ) -> Response:
        stats, tree = await run_in_threadpool(engine.stats), await watch.tree()
        body = {
            "started": started,
            "time": time.time(),
            "model": engine.model_name,
            "memory": _memory(stats, engine.spec.page_bytes),
            "held": _held(stats),
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "answers_waiting": stats.answers_waiting,
            "healings_waiting": stats.healings_waiting,
            "since_start": _since_start(stats, recent),
            "tree": None if tree["tick"] == tick else tree,
            "requests": recent.since(request),
            "timeline": {"columns": COLUMNS, "rows": timeline.since(sample)},
        }
        return JSONResponse(body, headers={"cache-control": "no-store"})


def _memory(stats: EngineStats, page_bytes: int) -> Json:
    pages = stats.cache.pages_by_use()
    return {
        "page_bytes": page_bytes,
        "pages": {**pages, "total": stats.cache.pages_total},
        "bytes": {use: count * page_bytes for use, count in pages.items()},
    }


def _held(stats: EngineStats) -> Json:
    cache = stats.cache
    return {
        "checkpoints": cache.checkpoints,
        "nodes": cache.nodes,
        "namespaces": cache.namespaces,
        "dead_kv_tokens": cache.dead_kv_tokens,
    }


def _since_start(stats: EngineStats, recent: Recent) -> Json:
    cache = stats.cache
    return {
        "prompts": recent.prompts,
        "hits": recent.hits,
        "prompt_tokens": recent.prompt_tokens,
        "cached_tokens": recent.cached_tokens,
        "output_tokens": recent.output_tokens,
        "hit_rate": recent.cached_tokens / recent.prompt_tokens if recent.prompt_tokens else None,
        "misses": {str(reason): count for reason, count in recent.reasons.items() if reason is not Reason.FULL},
        "full_hits": recent.reasons[Reason.FULL],
        "computed_tokens": computed_by_kind(stats),
        "evictions": cache.evictions_by_kind(),
        "checkpoints_taken": cache.saved_by_kind(),
        "resumes": cache.resumes,
        "healings": stats.healings_by_outcome(),
        "preemptions": stats.preemptions,
        "refused": stats.refused,
        "expired": stats.expired,
        "failed_steps": stats.failed_steps,
    }

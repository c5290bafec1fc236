"""Planner and cache of the server, without its queue."""

from __future__ import annotations

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.lab.replayed import Replayed
from headwater.lab.tuner import prefill
from headwater.schedule.planner import Planner
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

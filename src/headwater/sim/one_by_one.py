"""Planner and cache of the server, without its queue."""

from __future__ import annotations

from headwater.cache import PrefixCache
from headwater.errors import OutOfPages
from headwater.schedule.planner import Budget, Planner
from headwater.schedule.sequence import Sequence
from headwater.sim.replayed import Replayed
from headwater.traces.request import Request, Trace
from headwater.types import CacheAccount

ENDLESS = Budget(tokens=1 << 60, saves=1 << 60)


class OneByOne:
    """Requests one after the other: a prompt's prefill is one leg, its answer's another."""

    def __init__(self, trace: Trace, cache: PrefixCache, planner: Planner) -> None:
        self._trace, self._cache, self._planner = trace, cache, planner
        self._unit = cache.layout.unit_tokens
        self._ids = 0

    def serve(self, request: Request) -> CacheAccount | None:
        """Its prompt, and what was answered as far as it is known. None: it does not fit into the memory at all."""
        seq = Replayed(self._next_id(), self._trace, request)
        if not self._prefill(seq):
            return None
        end = request.known_tokens // self._unit * self._unit
        if self._planner.keeps_answers and end > seq.n_prompt // self._unit * self._unit:
            self._prefill(seq.answer(self._next_id(), end))
        return seq.account

    def _prefill(self, seq: Sequence) -> bool:
        try:
            plan = self._planner.first_leg(seq, ENDLESS, ())
        except OutOfPages:
            return False
        assert plan is not None, "an endless budget is large enough for any leg"
        self._cache.commit(plan)
        self._cache.release(seq.id)
        return True

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

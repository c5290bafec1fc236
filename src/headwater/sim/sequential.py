"""Requests one by one, in the order in which they come: what a policy would hit, apart from any load."""

from __future__ import annotations

from headwater.cache import PrefixCache
from headwater.errors import OutOfPages
from headwater.schedule.planner import Budget, Planner
from headwater.schedule.sequence import Sequence
from headwater.sim.ideal import Ideal
from headwater.sim.replayed import Replayed
from headwater.sim.setup import Setup
from headwater.sim.tally import Tally
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Request, Trace

ENDLESS = Budget(tokens=1 << 60, saves=1 << 60)


class OneByOne:
    """Planner and cache of the server, without its queue: a request's prefill is one leg, its answer another."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self.trace, self.setup = trace, setup
        self.layout = setup.layout(trace)
        self.cache: PrefixCache = setup.cache(self.layout)
        self.planner: Planner = setup.planner(self.cache, self.layout)
        self.ideal = Ideal(trace, self.layout.unit_tokens)
        self._ids = 0

    def run(self, arrivals: Arrivals) -> Tally:
        """All requests to the end of `arrivals`; their answers take no time."""
        tally = Tally(self.layout.flops, len(arrivals))
        while (due := arrivals.due()) is not None:
            request = arrivals.take()
            self.serve(request, tally, due)
            arrivals.answered(request, due)
        return tally

    def serve(self, request: Request, tally: Tally, at: float) -> None:
        """One request: its prompt, and what was answered as far as it is known."""
        seq = Replayed(self._next_id(), self.trace, request)
        if self._prefill(seq):
            tally.add(request, seq.account, self.ideal.hit(request), at)
            end = request.known_tokens // self.layout.unit_tokens * self.layout.unit_tokens
            if self.setup.keeps_answers and end > seq.n_prompt // self.layout.unit_tokens * self.layout.unit_tokens:
                self._prefill(seq.answer(self._next_id(), end))
        else:
            tally.add(request, None, self.ideal.hit(request), at)
        tally.sample(self.cache)

    def _prefill(self, seq: Sequence) -> bool:
        """False: it does not fit into the memory at all."""
        try:
            plan = self.planner.first_leg(seq, ENDLESS, ())
        except OutOfPages:
            return False
        assert plan is not None, "an endless budget is large enough for any leg"
        self.cache.commit(plan)
        self.cache.release(seq.id)
        return True

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

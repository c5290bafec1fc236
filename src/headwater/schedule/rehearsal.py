"""Requests that were served once, served again one by one: what Marconi's tuner asks of a cache and its policies."""

from __future__ import annotations

from collections.abc import Sequence as Requests

from headwater.cache import PrefixCache
from headwater.cache.positions import Placement
from headwater.cache.tuning import Seen
from headwater.errors import OutOfPages
from headwater.request import Generation, SamplingParams
from headwater.schedule.planner import Budget, Planner
from headwater.schedule.sequence import Sequence

ENDLESS = Budget(tokens=1 << 60, saves=1 << 60)
NOTHING = SamplingParams(max_tokens=0)


class Rehearsed(Sequence):
    """The prompt of a request that was seen, or the prefill of what was answered to it."""

    def __init__(self, id: int, seen: Seen, answer_until: int | None = None) -> None:
        self.seen = seen
        self._n_prompt = seen.prompt_tokens if answer_until is None else answer_until
        keeps = seen.known_tokens > seen.prompt_tokens
        generation = Generation((), NOTHING, seen.namespace, seen.boundaries, keep_output=keeps)
        super().__init__(id, generation, samples=answer_until is None)

    def __post_init__(self) -> None:
        self.key = self.seen.key  # a match looks no further than `n_prompt`

    @property
    def n_prompt(self) -> int:
        return self._n_prompt

    @property
    def known_tokens(self) -> int:
        return self.seen.known_tokens


def rehearse(cache: PrefixCache, placement: Placement, window: Requests[Seen]) -> int:
    """Serve them all; returns the prompt tokens that were hit."""
    planner = Planner(cache, placement, cache.layout)
    unit = cache.layout.unit_tokens
    hits = 0
    for number, seen in enumerate(window):
        prompt = Rehearsed(2 * number, seen)
        if not prefill(planner, cache, prompt):
            continue
        assert prompt.account is not None, "a request that was planned has an account"
        hits += prompt.account.resumed_at
        end = prompt.answer_end(unit) if prompt.generation.keep_output else None
        if end is not None:
            prefill(planner, cache, Rehearsed(2 * number + 1, seen, end))
    return hits


def prefill(planner: Planner, cache: PrefixCache, seq: Sequence) -> bool:
    """All of it in one leg. False: it does not fit into the memory at all."""
    try:
        plan = planner.first_leg(seq, ENDLESS, ())
    except OutOfPages:
        return False
    assert plan is not None, "an endless budget is large enough for any leg"
    cache.commit(plan)
    cache.release(seq.id)
    return True

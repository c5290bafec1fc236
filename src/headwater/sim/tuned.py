"""What Marconi's tuner needs of the lab: to be told of requests, and to have them replayed."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.placement import Placement
from headwater.cache.tuning import Seen, Tuner
from headwater.schedule.planner import Planner
from headwater.sim.one_by_one import OneByOne
from headwater.traces.request import Request, Trace


class Tuning:
    """Tells a tuner of each request that is done, where the policy has one; the same request always adopts its result.

    workers: processes that replay; 0: none.
    """

    def __init__(self, trace: Trace, cache: PrefixCache, placement: Placement, workers: int = 0) -> None:
        self._trace = trace
        tuned = isinstance(cache.policy, Marconi)
        self._tuner = Tuner(cache, placement, replay_window, workers) if tuned else None

    def seen(self, request: Request) -> None:
        if self._tuner is not None and not self._tuner.done:
            key = self._trace.key(request, request.known_tokens)
            self._tuner.seen(
                Seen(request.namespace, key, request.prompt_tokens, request.known_tokens, request.boundaries)
            )

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()


def replay_window(cache: PrefixCache, placement: Placement, window: Sequence[Seen]) -> int:
    """Serve requests that were seen before; returns the tokens that were hit."""
    layout = cache.layout
    trace = Trace("window", (), 1 if layout.unit_bytes == 4 * layout.unit_tokens else layout.unit_tokens)
    alone = OneByOne(trace, cache, Planner(cache, placement, layout))
    hits = 0
    for seen in window:
        request = Request(
            session="",
            text=seen.key,
            prompt_tokens=seen.prompt_tokens,
            output_tokens=seen.known_tokens - seen.prompt_tokens,
            known_tokens=seen.known_tokens,
            boundaries=seen.boundaries,
            namespace=seen.namespace,
        )
        account = alone.serve(request)
        hits += 0 if account is None else account.resumed_at
    return hits

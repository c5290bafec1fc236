"""What Marconi's tuner needs of the lab: to be told of requests."""

from __future__ import annotations

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.positions import Placement
from headwater.cache.tuning import Seen, Tuner
from headwater.schedule.rehearsal import rehearse
from headwater.traces.request import Request, Trace


class Tuning:
    """Tells a tuner of each request that is done, where the policy has one; the same request always adopts its result.

    keeps_answers: whether what was generated is cached here, as it is replayed then. workers: processes that replay;
    0: none.
    """

    def __init__(
        self, trace: Trace, cache: PrefixCache, placement: Placement, keeps_answers: bool, workers: int = 0
    ) -> None:
        self._trace, self._keeps_answers = trace, keeps_answers
        tuned = isinstance(cache.policy, Marconi)
        self._tuner = Tuner(cache, placement, rehearse, workers) if tuned else None

    def seen(self, request: Request) -> None:
        if self._tuner is not None and not self._tuner.done:
            known = request.known_tokens if self._keeps_answers else request.prompt_tokens
            key = self._trace.key(request, known)
            self._tuner.seen(Seen(request.namespace, key, request.prompt_tokens, known, request.boundaries))

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()

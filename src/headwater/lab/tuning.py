"""Observers that report completed requests to Marconi's tuner: of a trace in the lab, and of a server's engine."""

from __future__ import annotations

import logging

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.positions import Placement
from headwater.lab.tuner import Served, Tuner
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Sequence
from headwater.traces.request import Request, Trace

WORKERS = 2  # processes that replay beside a server
log = logging.getLogger("headwater.engine")


class TraceTuning:
    """Report a trace's requests to the tuner, if the policy has one; the same request always adopts its result.

    keeps_answers: whether answers are cached here, and so replayed. workers: processes that replay; 0: none.
    """

    def __init__(
        self, trace: Trace, cache: PrefixCache, placement: Placement, keeps_answers: bool, workers: int = 0
    ) -> None:
        self._trace, self._keeps_answers = trace, keeps_answers
        tuned = isinstance(cache.policy, Marconi)
        self._tuner = Tuner(cache, placement, workers=workers) if tuned else None

    def completed(self, request: Request) -> None:
        if self._tuner is not None and not self._tuner.done:
            known = request.known_tokens if self._keeps_answers else request.prompt_tokens
            key = self._trace.key(request, known)
            self._tuner.observe(Served(request.namespace, key, request.prompt_tokens, known, request.boundaries))

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()


class ServerTuning:
    """Observer of an engine whose policy is Marconi's: reports each complete answer to the tuner.

    Requests continue while the tuner replays. Its errors are logged, and leave alpha as it is.
    """

    def __init__(self, scheduler: Scheduler, cache: PrefixCache) -> None:
        self._unit, self._keeps_answers = scheduler.layout.unit_tokens, scheduler.decode_reuse != "none"
        self._tuner: Tuner | None = Tuner(cache, scheduler.placement, workers=WORKERS, wait=False)

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
        tuner.observe(Served(seq.namespace, key, seq.n_prompt, known, seq.generation.boundaries))

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

"""What Marconi's tuner needs of the engine: to be told of requests; it replays in processes of its own."""

from __future__ import annotations

import logging

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.tuning import Seen, Tuner
from headwater.schedule.rehearsal import rehearse
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Sequence

WORKERS = 2
log = logging.getLogger("headwater.engine")


class Tuning:
    """Tells a tuner of each answer that is complete, where the policy has one. Requests go on while it replays."""

    def __init__(self, scheduler: Scheduler) -> None:
        cache = scheduler.cache
        self._unit, self._keeps_answers = scheduler.layout.unit_tokens, scheduler.decode_reuse != "none"
        self._tuner: Tuner | None = None
        if isinstance(cache, PrefixCache) and isinstance(cache.policy, Marconi):
            self._tuner = Tuner(cache, scheduler.placement, rehearse, WORKERS, wait=False)

    def seen(self, seq: Sequence) -> None:
        """Its answer is complete. What goes wrong in the tuner is logged, and leaves alpha as it is."""
        if self._tuner is None or self._tuner.done:
            return
        try:
            self._tell(self._tuner, seq)
        except Exception as error:
            self._give_up(error)
        else:
            if self._tuner.failure is not None:
                self._give_up(self._tuner.failure)

    def _tell(self, tuner: Tuner, seq: Sequence) -> None:
        keeps = self._keeps_answers and seq.generation.keep_output
        known = max(seq.n_prompt, seq.known_tokens // self._unit * self._unit if keeps else 0)
        key = seq.key_until(known) if known > seq.n_prompt else seq.key
        tuner.seen(Seen(seq.namespace, key, seq.n_prompt, known, seq.generation.boundaries))

    def _give_up(self, error: BaseException) -> None:
        log.error("the tuner of eviction policy marconi has ended, alpha stays as it is", exc_info=error)
        self.close()
        self._tuner = None

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()

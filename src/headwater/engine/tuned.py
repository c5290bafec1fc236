"""What Marconi's tuner needs of the engine: to be told of requests; it replays in processes of its own."""

from __future__ import annotations

from headwater.cache import PrefixCache
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.tuning import Seen, Tuner
from headwater.schedule.rehearsal import rehearse
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Sequence

WORKERS = 2


class Tuning:
    """Tells a tuner of each answer that is complete, where the policy has one. Requests go on while it replays."""

    def __init__(self, scheduler: Scheduler) -> None:
        cache = scheduler.cache
        self._unit, self._keeps_answers = scheduler.layout.unit_tokens, scheduler.decode_reuse != "none"
        self._tuner: Tuner | None = None
        if isinstance(cache, PrefixCache) and isinstance(cache.policy, Marconi):
            self._tuner = Tuner(cache, scheduler.placement, rehearse, WORKERS, wait=False)

    def seen(self, seq: Sequence) -> None:
        """Its answer is complete."""
        if self._tuner is None or self._tuner.done:
            return
        keeps = self._keeps_answers and seq.generation.keep_output
        known = max(seq.n_prompt, seq.known_tokens // self._unit * self._unit if keeps else 0)
        key = seq.key_until(known) if known > seq.n_prompt else seq.key
        self._tuner.seen(Seen(seq.namespace, key, seq.n_prompt, known, seq.generation.boundaries))

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()

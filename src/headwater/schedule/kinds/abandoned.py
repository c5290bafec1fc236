"""Abandoned prefills: the state of a prompt that was computed in part is kept, for the same request sent again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.account import Reason
from headwater.cache.prefix_cache import PrefixCache
from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Phase, Purpose, Sequence

MIN_ABANDONED_TOKENS = 512  # computed tokens after the last checkpoint for which one more is taken


@dataclass(eq=False)
class AbandonedPrefill(Sequence):
    """The last page of a prefill whose request ended before its answer: it ends in a checkpoint.

    It continues with the id, slot and pages of the request. It is not a request, so it is dropped if memory is short.
    """

    purpose = Purpose.PROMPT

    @classmethod
    def of(cls, seq: Request, cache: PrefixCache) -> AbandonedPrefill | None:
        """Return the rest of a request's prefill; None if less would be lost, or no later request could resume there.

        The states between composed segments, and those after them, are of no use to others.
        """
        end = seq.computed + cache.layout.unit_tokens
        if seq.phase is not Phase.PREFILL or seq.scores_prompt or seq.marked_from is not None or end > seq.n_prompt:
            return None
        match = cache.match(seq.key, seq.computed + 1, seq.namespace)
        if match.reason is Reason.CACHE_OFF or seq.computed - match.checkpoint_tokens < MIN_ABANDONED_TOKENS:
            return None
        asked = replace(seq.generation, prompt=seq.generation.prompt[:end])
        rest = cls(seq.id, asked, phase=seq.phase, slot=seq.slot, checkpoints=(end,), placed_until=end)
        rest.computed, rest.planned, rest.table = seq.computed, seq.planned, seq.table
        return rest

"""Balanced: k checkpoints at equal distances."""

from __future__ import annotations

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


def balanced(depths: int, k: int) -> list[int]:
    """Return k of the positions 1..depths whose k + 1 gaps differ by at most 1.

    Sparse prefix caching, theorem 1: no k positions cost less on average if all overlap depths are equally likely,
    nor in the worst case.
    """
    return [part * (depths + 1) // (k + 1) for part in range(1, k + 1)]


class Balanced(Placement):
    """k checkpoints that divide the prompt evenly, floored to the grid.

    The k positions divide the whole prompt: those in its matched part are not replaced by others. `end` adds a
    checkpoint at the end of the sequence, beyond the k: the prompt's last page, unless the answer is cached with its
    end. The paper has no such checkpoint. Without it a chat whose answers are not cached recomputes, each turn, the
    last gap of the turn before, which is 1/(k + 1) of it; `end=False` is the paper's rule.
    """

    def __init__(self, k: int, end: bool = True) -> None:
        if k < 1:
            raise ValueError(f"{k} checkpoints cannot be placed; at least 1 can")
        self._k, self._end = k, end

    def place(self, query: PlacementQuery) -> Placed:
        return Placed(query.fresh((*balanced(max(0, query.length - 1), self._k), *query.end(self._end))))

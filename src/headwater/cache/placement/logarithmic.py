"""Logarithmic: k checkpoints whose distances grow exponentially."""

from __future__ import annotations

from fractions import Fraction

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


class Logarithmic(Placement):
    """k checkpoints whose k + 1 gaps grow by a factor of `base` from the start, floored to the grid.

    The i-th of a prompt that can be overlapped to a depth of N stands at (N + 1)·(baseⁱ − 1) / (baseᵏ⁺¹ − 1): with
    base 2 half of the prompt lies beyond the last. With a large k the first ones fall into one page and count as one.
    `end` adds the end of the sequence, as in `balanced`.
    """

    def __init__(self, k: int, base: float = 2.0, end: bool = True) -> None:
        if k < 1:
            raise ValueError(f"{k} checkpoints cannot be placed; at least 1 can")
        if base <= 1:
            raise ValueError(f"gaps grow by a factor of {base:g}; it needs to be more than 1")
        self._end = end
        growth = Fraction(base)
        self._shares = [(growth**i - 1) / (growth ** (k + 1) - 1) for i in range(1, k + 1)]

    def place(self, query: PlacementQuery) -> Placed:
        depths = max(0, query.length - 1)
        return Placed(query.fresh((*(int(share * (depths + 1)) for share in self._shares), *query.end(self._end))))

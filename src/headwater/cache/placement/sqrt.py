"""Sqrt: a checkpoint every √N tokens."""

from __future__ import annotations

from math import isqrt

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


class Sqrt(Placement):
    """Every ⌈√N⌉ tokens of a prompt that can be overlapped to a depth of N, floored to the grid.

    The number of checkpoints and the recomputed tokens grow alike (sparse prefix caching, after theorem 1). `end` adds
    the end of the sequence, as in `balanced`.
    """

    def __init__(self, end: bool = True) -> None:
        self._end = end

    def place(self, query: PlacementQuery) -> Placed:
        depths = max(0, query.length - 1)
        gap = isqrt(depths - 1) + 1 if depths else 1
        return Placed(query.fresh((*range(gap, depths + 1, gap), *query.end(self._end))))

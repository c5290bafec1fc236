"""No checkpoints: only KV is cached."""

from __future__ import annotations

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


class NoCheckpoints(Placement):
    """No positions: the baseline for KV without states, which saves nothing in a hybrid model."""

    def place(self, query: PlacementQuery) -> Placed:
        return Placed()

    def place_answer(self, query: PlacementQuery) -> Placed:
        return Placed()

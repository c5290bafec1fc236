"""No checkpoints: KV alone is cached."""

from __future__ import annotations

from headwater.cache.placement.policy import Placed, PlacementQuery


class NoCheckpoints:
    """The baseline that shows what KV without states is worth in a hybrid model: nothing."""

    def place(self, query: PlacementQuery) -> Placed:
        return Placed()

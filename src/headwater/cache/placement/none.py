"""No checkpoints: KV alone is cached."""

from __future__ import annotations

from headwater.cache.positions import Placed, PlacementQuery, Unlearned


class NoCheckpoints(Unlearned):
    """The baseline that shows what KV without states is worth in a hybrid model: nothing."""

    def place(self, query: PlacementQuery) -> Placed:
        return Placed()

    def place_answer(self, query: PlacementQuery) -> Placed:
        return Placed()

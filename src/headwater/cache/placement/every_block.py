"""Every block: a checkpoint at every k-th page."""

from __future__ import annotations

from headwater.cache.placement.base import Placed, Placement, PlacementQuery


class EveryBlock(Placement):
    """Positions k, 2k, 3k, ... pages: the baseline of the sparse prefix caching paper."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a block has {pages} pages; it needs at least 1")
        self._pages = pages

    def place(self, query: PlacementQuery) -> Placed:
        return self._until(query.last_page, query)

    def place_answer(self, query: PlacementQuery) -> Placed:
        return self._until(query.length, query)

    def _until(self, end: int, query: PlacementQuery) -> Placed:
        block = self._pages * query.page_size
        first = query.match.checkpoint_tokens // block + 1
        return Placed(tuple(range(first * block, end + 1, block)))

"""A checkpoint at every k-th page."""

from __future__ import annotations

from headwater.cache.placement.policy import Placed, PlacementQuery, Unlearned


class EveryBlock(Unlearned):
    """Positions k, 2k, 3k, ... pages: the baseline of the sparse prefix caching paper."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a block has {pages} pages; it needs at least 1")
        self._pages = pages

    def place(self, query: PlacementQuery) -> Placed:
        block = self._pages * query.page_size
        first = query.match.checkpoint_tokens // block + 1
        return Placed(tuple(range(first * block, query.last_page + 1, block)))

"""Least frequently used."""

from __future__ import annotations

from headwater.cache.order.ranked import Ranked
from headwater.plan import CacheLayout


class Lfu(Ranked):
    """The checkpoint with the fewest requests that resumed there since it was taken goes; of equals the oldest use.

    Counts live as long as the checkpoint: nothing decays, and one that is taken again begins at 0.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(lambda node: (node.hits, node.checkpoint_time))

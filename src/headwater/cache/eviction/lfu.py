"""LFU: the least frequently used checkpoint goes."""

from __future__ import annotations

from headwater.cache.eviction.base.ranked import Ranked
from headwater.plan import CacheLayout


class Lfu(Ranked):
    """Fewest requests that resumed at the checkpoint since it was taken goes; of equals the oldest use.

    A count lives as long as its checkpoint: it does not decay, and a checkpoint that is taken again begins at 0.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(lambda node: (node.hits, node.checkpoint_time))

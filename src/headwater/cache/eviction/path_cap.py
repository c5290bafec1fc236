"""Path cap: LRU under which a path keeps only its k deepest checkpoints."""

from __future__ import annotations

from headwater.cache.eviction.base.policy import Kind, Victim
from headwater.cache.eviction.lru import Lru
from headwater.cache.node import Node
from headwater.plan import CacheLayout


class PathCap(Lru):
    """All checkpoints of a committed path go, except its `k` deepest unpinned ones and those at branch points.

    The end of a running request's path is pinned: it neither counts nor goes. A branch point is a node with several
    children. If memory is short, LRU decides.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout, k: int) -> None:
        if k < 0:
            raise ValueError(f"k is {k}, and must be at least 0")
        super().__init__(layout)
        self._k = k

    def surplus(self, node: Node, now: int) -> Victim | None:
        kept = 0
        for above in node.climb():
            if above.checkpoint is not None and not above.pins and len(above.children) <= 1:
                if kept == self._k:
                    return above, Kind.CHECKPOINT
                kept += 1
        return None

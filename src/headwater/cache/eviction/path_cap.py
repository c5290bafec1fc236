"""LRU under which a path keeps only its deepest checkpoints."""

from __future__ import annotations

from headwater.cache.eviction.lru import Lru
from headwater.cache.node import Node
from headwater.cache.order import Kind, Victim
from headwater.plan import CacheLayout


class PathCap(Lru):
    """At commit all checkpoints of the path go but the `k` deepest unpinned ones, and those at branch points.

    What a running request's path ends at is pinned: it is neither counted nor given up. A branch point is a node with
    several children. Then as LRU.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout, k: int) -> None:
        if k < 0:
            raise ValueError(f"k is {k}, and must be at least 0")
        super().__init__(layout)
        self._k = k

    def surplus(self, node: Node, now: int) -> Victim | None:
        kept = 0
        climb: Node | None = node
        while climb is not None:
            if climb.checkpoint is not None and not climb.pins and len(climb.children) <= 1:
                if kept == self._k:
                    return climb, Kind.CHECKPOINT
                kept += 1
            climb = climb.parent
        return None

"""Leaves in LRU order: KV goes from the leaves to the root, so these are the nodes whose KV may go next."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.node import Node
from headwater.cache.order import Kind, Victim, is_free_leaf
from headwater.cache.order.heap import LazyHeap


class Leaves:
    """Unpinned leaves by the time of their KV's last use. A leaf with a checkpoint loses the checkpoint first."""

    def __init__(self) -> None:
        by_time = attrgetter("kv_time")
        self._bare = LazyHeap[int](lambda node: node.checkpoint is None and is_free_leaf(node), by_time)
        self._kept = LazyHeap[int](lambda node: node.checkpoint is not None and is_free_leaf(node), by_time)

    def changed(self, node: Node) -> None:
        if is_free_leaf(node):
            (self._bare if node.checkpoint is None else self._kept).add(node)

    def bare(self) -> Node | None:
        """Return the oldest leaf without checkpoint."""
        return self._bare.lowest()

    def oldest(self) -> Victim | None:
        """Return the oldest leaf's checkpoint, or its tail if it has none."""
        bare, kept = self.bare(), self._kept.lowest()
        if kept is None:
            return None if bare is None else (bare, Kind.TAIL)
        if bare is None or (kept.kv_time, kept.serial) < (bare.kv_time, bare.serial):
            return kept, Kind.CHECKPOINT
        return bare, Kind.TAIL

"""KV leaf to root, by its own time: what a pool that holds nothing else gives up."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.node import Node
from headwater.cache.order import Kind, Victim
from headwater.cache.order.age_queue import AgeQueue


class Leaves:
    """Unpinned leaves by their KV's time. One with a checkpoint loses that first."""

    def __init__(self) -> None:
        self._bare = AgeQueue(attrgetter("kv_time"), lambda node: node.checkpoint is None and is_free_leaf(node))
        self._kept = AgeQueue(attrgetter("kv_time"), lambda node: node.checkpoint is not None and is_free_leaf(node))

    def changed(self, node: Node) -> None:
        if is_free_leaf(node):
            (self._bare if node.checkpoint is None else self._kept).add(node)

    def bare(self) -> Node | None:
        """The oldest one without checkpoint."""
        return self._bare.oldest()

    def oldest(self) -> Victim | None:
        bare, kept = self.bare(), self._kept.oldest()
        if kept is None:
            return None if bare is None else (bare, Kind.TAIL)
        if bare is None or (kept.kv_time, kept.serial) < (bare.kv_time, bare.serial):
            return kept, Kind.CHECKPOINT
        return bare, Kind.TAIL


def is_free_leaf(node: Node) -> bool:
    """Whether KV may go from it, once it has no checkpoint."""
    return not node.children and not node.pins and node.parent is not None

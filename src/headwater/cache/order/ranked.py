"""Eviction of checkpoints by a rank that changes only when a node is used: the base of lfu and gdsf."""

from __future__ import annotations

from collections.abc import Callable

from headwater.cache.node import Node
from headwater.cache.order import Eviction, Kind, Room, Victim, is_free_leaf
from headwater.cache.order.heap import LazyHeap, Leaves, Rank
from headwater.cache.order.worth import Bases, next_below


class Ranked(Eviction):
    """Lowest rank goes. A leaf without checkpoint saves nothing and goes before, then speculative checkpoints.

    rank: called whenever a node changes or is used. relative: it depends on the nearest ancestor with a checkpoint.
    A pool of KV alone evicts leaves without checkpoint, then the leaf with the lowest rank, its checkpoint first.
    """

    def __init__(self, rank: Callable[[Node], Rank], relative: bool = False) -> None:
        self._rank, self._relative = rank, relative
        self._checkpoints = LazyHeap[Rank](lambda node: not node.holds)
        self._ends = LazyHeap[Rank](is_free_leaf)  # checkpoints of leaves
        self._leaves = Leaves()
        self._bases = Bases()

    def changed(self, node: Node) -> None:
        self._leaves.changed(node)
        if node.checkpoint is None:
            self._checkpoints.discard(node)
            self._ends.discard(node)
        else:
            self.touched(node)
        if self._bases.toggles(node) and self._relative:
            for below in next_below(node):
                self.touched(below)

    def touched(self, node: Node) -> None:
        if node.checkpoint is None:
            return
        rank = (0.0 if node.speculative else 1.0, *self._rank(node))
        self._checkpoints.put(node, rank)
        if is_free_leaf(node):
            self._ends.put(node, rank)
        else:
            self._ends.discard(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.STATE and (bare := self._leaves.bare()) is not None:
            return bare, Kind.TAIL
        node = (self._ends if room is Room.KV else self._checkpoints).lowest()
        return None if node is None else (node, Kind.CHECKPOINT)

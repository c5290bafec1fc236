"""Checkpoints by a rank of their own, lowest first; what lfu and gdsf share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.cache.node import Node
from headwater.cache.order import Kind, Room, Victim
from headwater.cache.order.leaves import Leaves, is_free_leaf
from headwater.cache.order.ranking import Rank, Ranking


class Ranked:
    """A leaf without checkpoint saves nothing: it goes first, the oldest KV before the rest. Then speculative ones.

    rank: asked whenever a node changes or is used. relative: it depends on the nearest ancestor with a checkpoint.
    A pool of KV alone gives up bare leaves, then the leaf with the lowest rank, its checkpoint first.
    """

    keeps_history = True

    def __init__(self, rank: Callable[[Node], Rank], relative: bool = False) -> None:
        self._rank, self._relative = rank, relative
        self._checkpoints = Ranking(lambda node: not node.holds)
        self._ends = Ranking(is_free_leaf)  # checkpoints of leaves
        self._leaves = Leaves()
        self._bases: set[Node] = set()  # nodes with a checkpoint

    def changed(self, node: Node) -> None:
        self._leaves.changed(node)
        if node.checkpoint is None:
            self._checkpoints.discard(node)
            self._ends.discard(node)
        else:
            self.touched(node)
        if (node.checkpoint is not None) != (node in self._bases):
            self._bases ^= {node}
            if self._relative:
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

    def surplus(self, node: Node, now: int) -> Victim | None:
        return None


def next_below(node: Node) -> Iterator[Node]:
    """The nearest nodes with a checkpoint below `node`."""
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        if below.checkpoint is not None:
            yield below
        else:
            stack.extend(below.children.values())

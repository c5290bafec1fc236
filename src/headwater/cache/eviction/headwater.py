"""Headwater's own policy: recency, frequency and worth of a checkpoint, and whether a deeper one took its place."""

from __future__ import annotations

from math import sqrt

from headwater.cache.node import Node
from headwater.cache.order import is_free_leaf
from headwater.cache.order.ranked import BareFirst
from headwater.cache.order.table import Columns, OverDistance
from headwater.cache.order.worth import Worth, base_node, next_below
from headwater.plan import CacheLayout

MOST_HITS = 2  # further hits do not count


class Headwater(BareFirst):
    """Lowest V = (1 + hits) x sqrt(worth) x place / age goes; dead KV before all, then speculative checkpoints.

    Hits are requests that resumed there, at most 2; worth is FLOPs saved over the nearest ancestor with a checkpoint,
    a page, and its root, since a long prefix is also less likely to come again; age is time since the last use.
    Place: a session resumes at its deepest checkpoint, so a checkpoint with another below it was superseded and counts
    1/`superseded`; one with others on several branches below is where new sessions begin, and counts `branch` times.
    """

    keeps_history = False

    def __init__(self, layout: CacheLayout, superseded: float = 8.0, branch: float = 2.0) -> None:
        if superseded <= 0 or branch <= 0:
            raise ValueError(f"superseded is {superseded} and branch {branch}; both must be above 0")
        super().__init__()
        self._places = 1.0, 1 / superseded, branch  # by the number of branches with a checkpoint below: 0, 1, more
        self._worth = Worth(layout)
        self._checkpoints = Columns()

    def toggled(self, node: Node) -> None:
        for below in next_below(node):
            self.place(below)
        if (above := base_node(node)) is not None:
            self.place(above)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        return self._checkpoints.lowest(OverDistance(now), leaves)[2]

    def place(self, node: Node) -> None:
        if node.checkpoint is None or node.holds:
            self._checkpoints.discard(node)
        else:
            self._checkpoints.put(node, self._value(node), node.checkpoint_time, is_free_leaf(node))

    def _value(self, node: Node) -> float:
        """Return V x age."""
        if node.speculative:
            return 0.0
        place = self._places[min(node.live - 1, 2)]
        return (1 + min(node.hits, MOST_HITS)) * sqrt(self._worth.of(node)) * place

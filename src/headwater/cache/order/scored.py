"""Checkpoints by a score: how much each is worth, and how recently it was used, both from 0 to 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import attrgetter

from headwater.cache.node import Node
from headwater.cache.order import Kind, Room, Victim
from headwater.cache.order.age_queue import AgeQueue
from headwater.cache.order.leaves import is_free_leaf
from headwater.cache.order.rows import INVERSE_AGE, Bounds, Recency, Rows, Scale

MAX_UNSETTLED = 4096


class Scored(ABC):
    """Lowest weight · minmax(value) + minmax(recency) goes. A subclass says what a node's value is.

    Candidates are checkpoints of nodes with at most one child (with `single_child=False`, of any node) and leaves
    without checkpoint, by the same score and their KV's time. Where there are none, the others' turn comes.
    Speculative checkpoints go before all others. A range without width counts the same for all.
    """

    keeps_history = True
    leaf_loses = Kind.CHECKPOINT  # what is taken from a leaf with a checkpoint where one pool holds all

    def __init__(
        self, weight: float, single_child: bool = True, recency: Recency = INVERSE_AGE, over_all: bool = False
    ) -> None:
        self.weight = weight
        self._single_child, self._recency, self._over_all = single_child, recency, over_all
        self._kept = Rows()  # checkpoints
        self._bare = Rows()  # leaves without checkpoint
        self._wide = Rows()  # checkpoints at nodes with several children, under `single_child`
        self._held = Rows()  # checkpoints that may not go
        self._tables = (self._kept, self._bare, self._wide, self._held)
        self._rows: dict[Node, Rows] = {}  # the table that a node is in
        self._speculative = AgeQueue(attrgetter("checkpoint_time"), lambda node: node.speculative and not node.holds)
        self._unsettled: set[Node] = set()  # changed since the tables were right
        self._bases: set[Node] = set()  # nodes with a checkpoint: where their descendants' work would begin

    @abstractmethod
    def value(self, node: Node) -> float:
        """What the node is worth. It may depend on its edge, its depth and its nearest ancestor with a checkpoint."""

    def changed(self, node: Node) -> None:
        self._unsettled.add(node)
        if len(self._unsettled) > MAX_UNSETTLED:
            self.settle()

    def touched(self, node: Node) -> None:
        self._unsettled.add(node)

    def settle(self) -> None:
        """Bring the tables up to date. Most nodes change many times between two evictions."""
        changed, self._unsettled = self._unsettled, set()
        for node in [node for node in changed if (node.checkpoint is not None) != (node in self._bases)]:
            self._bases ^= {node}
            changed.update(_measured_from(node))
        for node in changed:
            self._place(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        self.settle()
        if room is not Room.KV and (guess := self._speculative.oldest()) is not None:
            return guess, Kind.CHECKPOINT
        tables = [self._kept] if room is Room.STATE else [self._kept, self._bare]
        leaves = room is Room.KV
        node = self._lowest(tables, now, leaves) or self._lowest([self._wide], now, leaves)
        node = node or self._speculative.oldest()
        if node is None:
            return None
        if node.checkpoint is None:
            return node, Kind.TAIL
        return node, self.leaf_loses if room is Room.ANY and is_free_leaf(node) else Kind.CHECKPOINT

    def surplus(self, node: Node, now: int) -> Victim | None:
        return None

    def _lowest(self, tables: list[Rows], now: int, leaves: bool) -> Node | None:
        """The node with the lowest score of all tables; of equals the one with the least serial.

        What minmax subtracts is the same for all and left out.
        """
        tables = [rows for rows in tables if len(rows)]
        compared = self._tables if self._over_all else tables
        bounds = [found for rows in compared if (found := rows.bounds(leaves and not self._over_all)) is not None]
        if not bounds:
            return None
        scale = self._scale(bounds, now)
        lowest = [rows.lowest(scale, leaves) for rows in tables]
        return min((found for found in lowest if found is not None), default=(0, 0, None))[2]

    def _scale(self, bounds: list[Bounds], now: int) -> Scale:
        oldest, newest = min(table.oldest for table in bounds), max(table.newest for table in bounds)
        spread = max(table.high for table in bounds) - min(table.low for table in bounds)
        width = self._recency.of(max(1.0, now - newest)) - self._recency.of(max(1.0, now - oldest))
        return Scale(self.weight / spread if spread else 0.0, 1 / width if width else 0.0, self._recency, now, newest)

    def _place(self, node: Node) -> None:
        leaf = is_free_leaf(node)
        table: Rows | None = None
        if node.checkpoint is None:
            table = self._bare if leaf else None
        elif node.speculative:
            self._speculative.add(node)
        elif node.holds:
            table = self._held
        else:
            table = self._wide if self._single_child and len(node.children) > 1 else self._kept
        before = self._rows.get(node)
        if before is not None and before is not table:
            self._rows.pop(node).discard(node)
        if table is not None:
            self._rows[node] = table
            table.put(node, self.value(node), _time(node), leaf)


def _measured_from(node: Node) -> list[Node]:
    """Whose nearest ancestor with a checkpoint is the node, if it has one: its next ones, and what is between.

    One that left the tree still leads to what was below it.
    """
    found = []
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        found.append(below)
        if below.checkpoint is None:
            stack.extend(below.children.values())
    return found


def base(node: Node) -> int:
    """Depth of the nearest ancestor with a checkpoint; 0 if there is none."""
    climb = node.parent
    while climb is not None and climb.checkpoint is None:
        climb = climb.parent
    return 0 if climb is None else climb.end


def _time(node: Node) -> int:
    return node.kv_time if node.checkpoint is None else node.checkpoint_time

"""Eviction by a weighted sum of value and recency, each scaled to 0..1: the base of seglen and flop_aware."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from headwater.cache.eviction.base.lazy_heap import LazyHeap
from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.base.rows import NOTHING, Bounds, Column, Columns
from headwater.cache.eviction.base.worth import Bases, measured_from
from headwater.cache.node import Node, is_free_leaf

MAX_UNSETTLED = 4096


@dataclass(frozen=True, slots=True)
class Recency:
    """Recency of a node that was used `age` ago: of one age, and of a column in place, times a factor."""

    of: Callable[[float], float]
    scale: Callable[[Column, float], object]


INVERSE_AGE = Recency(lambda age: 1 / age, lambda age, factor: np.divide(factor, age, out=age))
LINEAR = Recency(lambda age: -age, lambda age, factor: np.multiply(age, -factor, out=age))
RECENCIES = {"inverse_age": INVERSE_AGE, "linear": LINEAR}


class Scale(NamedTuple):
    """Factors that bring value and recency to ranges of width 1; the value's includes its weight.

    What minmax subtracts is the same for all nodes, and left out.
    """

    by_value: float
    by_recency: float
    recency: Recency
    now: int
    newest: float  # no time is beyond it

    @classmethod
    def of(cls, bounds: list[Bounds], weight: float, recency: Recency, now: int) -> Scale:
        """Return the scale for tables with these bounds. A range without width counts the same for all nodes."""
        oldest, newest = min(table.oldest for table in bounds), max(table.newest for table in bounds)
        spread = max(table.high for table in bounds) - min(table.low for table in bounds)
        width = recency.of(max(1.0, now - newest)) - recency.of(max(1.0, now - oldest))
        return cls(weight / spread if spread else 0.0, 1 / width if width else 0.0, recency, now, newest)

    def into(self, score: Column, value: Column, time: Column, scratch: Column) -> None:
        """Write weight · minmax(value) + minmax(recency), but for a constant, to `score`."""
        np.subtract(self.now, time, out=score)
        if self.now <= self.newest:
            np.maximum(score, 1.0, out=score)
        self.recency.scale(score, self.by_recency)
        np.multiply(value, self.by_value, out=scratch)
        np.add(score, scratch, out=score)


class Scored(Eviction):
    """Lowest weight · minmax(value) + minmax(recency) goes. A subclass defines a node's value.

    Candidates are checkpoints of nodes with at most one child (with `single_child=False`, of any node) and leaves
    without checkpoint, by the same score and their KV's time. If there are none, the other checkpoints are candidates.
    Speculative checkpoints go before all others. A range without width counts the same for all.
    """

    leaf_loses = Kind.CHECKPOINT  # the part of a leaf with a checkpoint that is evicted if one pool holds all

    def __init__(
        self, weight: float, single_child: bool = True, recency: Recency = INVERSE_AGE, over_all: bool = False
    ) -> None:
        self.weight = weight
        self._single_child, self._recency, self._over_all = single_child, recency, over_all
        self._kept = Columns()  # checkpoints
        self._bare = Columns()  # leaves without checkpoint
        self._wide = Columns()  # checkpoints at nodes with several children, under `single_child`
        self._held = Columns()  # checkpoints that may not go
        self._tables = (self._kept, self._bare, self._wide, self._held)
        self._table_of: dict[Node, Columns] = {}
        self._speculative = LazyHeap[int](
            lambda node: node.speculative and not node.holds, attrgetter("checkpoint_time")
        )
        self._unsettled: set[Node] = set()  # nodes that changed since the tables were up to date
        self._bases = Bases()

    @abstractmethod
    def value(self, node: Node) -> float:
        """Return the node's value. It may depend on its edge, its depth and its nearest ancestor with a checkpoint."""

    def changed(self, node: Node) -> None:
        self._unsettled.add(node)
        if len(self._unsettled) > MAX_UNSETTLED:
            self.settle()

    def touched(self, node: Node) -> None:
        self._unsettled.add(node)

    def settle(self) -> None:
        """Bring the tables up to date. Most nodes change many times between two evictions."""
        changed, self._unsettled = self._unsettled, set()
        for node in [node for node in changed if self._bases.toggles(node)]:
            changed.update(measured_from(node))
        for node in changed:
            self._place(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        self.settle()
        if room is not Room.KV and (speculative := self._speculative.lowest()) is not None:
            return speculative, Kind.CHECKPOINT
        tables = [self._kept] if room is Room.STATE else [self._kept, self._bare]
        leaves = room is Room.KV
        node = self._lowest(tables, now, leaves) or self._lowest([self._wide], now, leaves)
        node = node or self._speculative.lowest()
        if node is None:
            return None
        if node.checkpoint is None:
            return node, Kind.TAIL
        return node, self.leaf_loses if room is Room.ANY and is_free_leaf(node) else Kind.CHECKPOINT

    def _lowest(self, tables: list[Columns], now: int, leaves: bool) -> Node | None:
        """Return the node with the lowest score in `tables`; of equals the one with the lowest serial."""
        tables = [rows for rows in tables if len(rows)]
        compared = self._tables if self._over_all else tables
        bounds = [found for rows in compared if (found := rows.bounds(leaves and not self._over_all)) is not None]
        if not bounds:
            return None
        scale = Scale.of(bounds, self.weight, self._recency, now)
        return min((rows.lowest(scale, leaves) for rows in tables), default=NOTHING)[2]

    def _place(self, node: Node) -> None:
        leaf = is_free_leaf(node)
        table: Columns | None = None
        if node.checkpoint is None:
            table = self._bare if leaf else None
        elif node.speculative:
            self._speculative.add(node)
        elif node.holds:
            table = self._held
        else:
            table = self._wide if self._single_child and len(node.children) > 1 else self._kept
        before = self._table_of.get(node)
        if before is not None and before is not table:
            self._table_of.pop(node).discard(node)
        if table is not None:
            self._table_of[node] = table
            table.put(node, self.value(node), node.kv_time if node.checkpoint is None else node.checkpoint_time, leaf)

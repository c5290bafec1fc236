"""Snapshot of a cache as rows, from which another cache continues, in this process or in another one.

It has rows because pickling nodes that refer to each other recurses as deep as the tree. Page ids, leases and the
eviction log are left out: the copy has pages of its own, and no request runs on it yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool

Pages = Callable[[int], "array[int]"]


def no_pages(count: int) -> array[int]:
    """Return no pages, for edges without KV."""
    return array("i")


@dataclass(frozen=True, slots=True)
class Row:
    """One node. Parents come before children."""

    parent: int  # row of the parent; -1 - n: the n-th root
    edge: bytes
    serial: int
    checkpoint: int | None  # number of its pages
    speculative: bool
    learned: bool
    times: tuple[int, int]  # KV's and the checkpoint's
    hits: int
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """All nodes of an index."""

    roots: tuple[str, ...]
    rows: tuple[Row, ...]
    serial: int

    @classmethod
    def of(cls, index: Index) -> Tree:
        """Return the rows of an index."""
        places: dict[Node, int] = {root: -1 - place for place, root in enumerate(index.roots.values())}
        rows: list[Row] = []
        for node in index:
            assert node.parent is not None, f"{node} is a root"
            places[node] = len(rows)
            checkpoint = None if node.checkpoint is None else len(node.checkpoint)
            times = node.kv_time, node.checkpoint_time
            parent = places[node.parent]
            kinds = node.speculative, node.learned
            rows.append(Row(parent, node.edge, node.serial, checkpoint, *kinds, times, node.hits, node.lost))
        return cls(tuple(index.roots), tuple(rows), index.serial)

    def plant(self, index: Index, kv: Pages = no_pages, states: Pages = no_pages) -> None:
        """Add all nodes to an empty index. kv, states: functions that take N pages from the pool."""
        index.serial = self.serial  # roots come after the nodes: no two may have the same serial
        roots = [index.root(name) for name in self.roots]
        nodes: list[Node] = []
        width = index.unit_bytes
        for row in self.rows:
            parent = nodes[row.parent] if row.parent >= 0 else roots[-1 - row.parent]
            units = len(row.edge) // width
            node = Node(parent, row.edge, kv(units * index.unit_pages), parent.end + units, row.serial)
            parent.adopt(row.edge[:width], node)
            if row.checkpoint is not None:
                node.checkpoint = states(row.checkpoint)
            node.kv_time, node.checkpoint_time = row.times
            node.speculative, node.learned = row.speculative, row.learned
            node.hits, node.lost = row.hits, row.lost
            nodes.append(node)
        index.load(nodes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a cache: its tree, its history (no generations, or two), and its clock."""

    tree: Tree
    history: tuple[Tree, ...]
    now: int

    def plant(self, index: Index, pool: Pool) -> None:
        """Fill an empty index with the tree, with pages of an unused pool of the same size."""
        kv = sum(len(row.edge) for row in self.tree.rows) // index.unit_bytes * index.unit_pages
        if pool.step:
            pool.trade(kv, sum(row.checkpoint or 0 for row in self.tree.rows))
        self.tree.plant(index, pool.kv.take, pool.states.take)
        for node in reversed(list(index)):  # remove nodes that only a lease of the original kept
            if node.parent is not None:
                index.tidy(node)

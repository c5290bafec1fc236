"""What a tree holds, as rows: to go on from there in another cache, here or in another process.

Rows, since nodes refer to each other: to follow them would recurse as deep as the tree. Page ids are not kept, nor
leases, nor what was given up: the copy takes pages of its own, and nobody runs on it yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.pool import Pool

Pages = Callable[[int], "array[int]"]


@dataclass(frozen=True, slots=True)
class Row:
    """A node. Parents come before children."""

    parent: int  # its row; -1 - n: the n-th root
    edge: bytes
    serial: int
    checkpoint: int | None  # its pages
    speculative: bool
    times: tuple[int, int]  # KV's and the checkpoint's
    hits: int
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """An index."""

    roots: tuple[str, ...]
    rows: tuple[Row, ...]
    serial: int

    @classmethod
    def of(cls, index: Index) -> Tree:
        places: dict[Node, int] = {root: -1 - place for place, root in enumerate(index.roots.values())}
        rows: list[Row] = []
        for node in index:
            assert node.parent is not None, f"{node} is a root"
            places[node] = len(rows)
            checkpoint = None if node.checkpoint is None else len(node.checkpoint)
            times = node.kv_time, node.checkpoint_time
            parent = places[node.parent]
            rows.append(Row(parent, node.edge, node.serial, checkpoint, node.speculative, times, node.hits, node.lost))
        return cls(tuple(index.roots), tuple(rows), index.serial)

    def plant(self, index: Index, kv: Pages, states: Pages) -> None:
        """Let an empty index hold all this. kv, states: give so many pages."""
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
            node.speculative, node.hits, node.lost = row.speculative, row.hits, row.lost
            nodes.append(node)
        index.load(nodes, self.serial)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache: its tree, the edges that it remembers (none, or those of two generations), and its clock."""

    tree: Tree
    history: tuple[Tree, ...]
    now: int

    def plant(self, index: Index, pool: Pool) -> None:
        """Let an empty index hold the tree, with pages of an untouched pool as large as the one before."""
        kv = sum(len(row.edge) for row in self.tree.rows) // index.unit_bytes * index.unit_pages
        if pool.step:
            pool.trade(kv, sum(row.checkpoint or 0 for row in self.tree.rows))
        self.tree.plant(index, pool.kv.take, pool.states.take)
        for node in reversed(list(index)):  # what stood only for a lease that is not here
            if node.parent is not None:
                index.tidy(node)

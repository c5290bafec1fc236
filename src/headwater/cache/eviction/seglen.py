"""SegLen: a checkpoint is worth what would have to be replayed without it, and how recently it was used."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.eviction.age_queue import AgeQueue
from headwater.cache.eviction.policy import Kind, Room, Victim
from headwater.cache.eviction.rows import Rows, lowest
from headwater.cache.node import Node
from headwater.types import CacheLayout


class SegLen:
    """Lowest U = w·minmax(L) + minmax(R) goes; L = length to the nearest ancestor with a checkpoint, R = 1/age.

    The article gives the idea, its authors' pull request the formula. A range without width counts 0.5, which ranks
    like 0. Candidates are checkpoints of nodes with at most one child (with `single_child=False`, of any node) and
    leaves without checkpoint, by the same score and their KV's time. Where there are none, the others' turn comes.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout, w: float = 0.85, single_child: bool = True) -> None:
        self._w, self._single_child = w, single_child
        self._kept = Rows()  # checkpoints
        self._bare = Rows()  # leaves without checkpoint
        self._wide = Rows()  # checkpoints at nodes with several children, under `single_child`
        self._speculative = AgeQueue(attrgetter("checkpoint_time"), lambda node: node.speculative and not node.holds)
        self._bases: set[Node] = set()  # nodes with a checkpoint: where their descendants' lengths begin

    def changed(self, node: Node) -> None:
        self._place(node)
        if (node.checkpoint is not None) != (node in self._bases):
            self._bases ^= {node}
            self._measure_below(node)

    def touched(self, node: Node) -> None:
        for rows in (self._kept, self._bare, self._wide):
            if node in rows:
                rows.refresh(node, _time(node))

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.KV and (guess := self._speculative.oldest()) is not None:
            return guess, Kind.CHECKPOINT
        tables = [self._kept] if room is Room.STATE else [self._kept, self._bare]
        leaves = room is Room.KV
        node = lowest(tables, self._w, now, leaves) or lowest([self._wide], self._w, now, leaves)
        node = node or self._speculative.oldest()
        if node is None:
            return None
        return node, Kind.TAIL if node.checkpoint is None else Kind.CHECKPOINT

    def surplus(self, node: Node, now: int) -> Victim | None:
        return None

    def _place(self, node: Node) -> None:
        leaf = node.parent is not None and not node.children and not node.pins
        table: Rows | None = None
        if node.checkpoint is None:
            table = self._bare if leaf else None
        elif node.speculative:
            self._speculative.add(node)
        elif not node.holds:
            table = self._wide if self._single_child and len(node.children) > 1 else self._kept
        for rows in (self._kept, self._bare, self._wide):
            if rows is not table:
                rows.discard(node)
        if table is not None:
            table.put(node, node.end - self._base(node), _time(node), leaf)

    def _base(self, node: Node) -> int:
        """Depth of the nearest ancestor with a checkpoint; 0 if there is none."""
        climb = node.parent
        while climb is not None and climb.checkpoint is None:
            climb = climb.parent
        return 0 if climb is None else climb.end

    def _measure_below(self, node: Node) -> None:
        """A checkpoint came or went: the lengths of those that are nearest below it begin elsewhere."""
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            self._place(below)
            if below.checkpoint is None:
                stack.extend(below.children.values())


def _time(node: Node) -> int:
    return node.kv_time if node.checkpoint is None else node.checkpoint_time

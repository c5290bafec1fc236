"""What prompts began with whose KV is gone: a branch point is found there, too (Marconi, section 4.1).

Two generations of trees of bare edges. When the young one is full the old one is forgotten, and it takes its place.
Lengths and positions in this file are in units.
"""

from __future__ import annotations

from array import array

from headwater.cache.index import Index
from headwater.cache.node import Node


class History:
    """Edges that outlived their pages, at most about 2 x `capacity` units of them."""

    def __init__(self, unit_bytes: int, capacity: int) -> None:
        self._unit_bytes, self._capacity = unit_bytes, capacity
        self._units = 0  # in the young tree
        self._young, self._old = self._tree(), self._tree()

    def note(self, namespace: str, node: Node) -> None:
        """The KV at the end of `node` is about to go: remember how one gets there."""
        edges = []
        climb: Node | None = node
        while climb is not None:
            edges.append(climb.edge)
            climb = climb.parent
        key = b"".join(reversed(edges))
        last, end = self._young.walk(self._young.root(namespace), key, node.end)
        if end < node.end:
            joint = last if last.end == end else self._young.boundary(last, end)
            self._young.add(joint, key, node.end, array("i"))
            self._units += node.end - end
        if self._units > self._capacity:
            self._old, self._young, self._units = self._young, self._tree(), 0

    def depth(self, namespace: str, key: bytes, limit: int) -> int:
        """How far `key` goes along what is remembered."""
        deepest = 0
        for tree in (self._young, self._old):
            root = tree.roots.get(namespace)
            if root is not None:
                deepest = max(deepest, tree.walk(root, key, limit)[1])
        return deepest

    def _tree(self) -> Index:
        return Index(self._unit_bytes, 0, _Nobody())


class _Nobody:
    def changed(self, node: Node) -> None:
        """Nothing is evicted from a history."""

    def touched(self, node: Node) -> None:
        """Nor has it times."""

"""Ghost entries: edges of the tree that outlive their pages. Lengths and positions are in units."""

from __future__ import annotations

from array import array

from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.snapshot import Tree


class Edges:
    """Keys without pages, as a tree that only grows."""

    def __init__(self, unit_bytes: int) -> None:
        self._tree = Index(unit_bytes, 0)
        self.units = 0  # that the edges hold

    @classmethod
    def planted(cls, unit_bytes: int, tree: Tree) -> Edges:
        """Build the edges of a snapshot."""
        edges = cls(unit_bytes)
        edges.units = sum(len(row.edge) for row in tree.rows) // unit_bytes
        tree.plant(edges._tree)
        return edges

    def rows(self) -> Tree:
        """Return a snapshot."""
        return Tree.of(self._tree)

    def note(self, namespace: str, key: bytes, units: int) -> int:
        """Add the first `units` of `key`; returns how many of them were there already."""
        last, end = self._tree.walk(self._tree.root(namespace), key, units)
        if end < units:
            joint = last if last.end == end else self._tree.boundary(last, end)
            self._tree.add(joint, key, units, array("i"))
            self.units += units - end
        return end

    def shared(self, namespace: str, key: bytes) -> int:
        """Return the depth up to which `key` is also the prefix of another key."""
        return self._tree.shared(namespace, key)

    def depth(self, namespace: str, key: bytes, limit: int) -> int:
        """Return the length of the longest prefix of `key` that was added, at most `limit`."""
        root = self._tree.roots.get(namespace)
        return 0 if root is None else self._tree.walk(root, key, limit)[1]


class History:
    """Prefixes whose KV was evicted: a branch point is found along them, too (Marconi, section 4.1).

    Two generations: when the young one holds `capacity` units, it replaces the old one.
    """

    def __init__(self, unit_bytes: int, capacity: int) -> None:
        self._unit_bytes, self._capacity = unit_bytes, capacity
        self._young, self._old = Edges(unit_bytes), Edges(unit_bytes)

    def rows(self) -> tuple[Tree, Tree]:
        """Return a snapshot of both generations."""
        return self._young.rows(), self._old.rows()

    def plant(self, young: Tree, old: Tree) -> None:
        """Replace the history by a snapshot."""
        self._young, self._old = Edges.planted(self._unit_bytes, young), Edges.planted(self._unit_bytes, old)

    def note(self, namespace: str, node: Node) -> None:
        """Remember the path to `node`, whose KV is about to be evicted."""
        key = b"".join([part.edge for part in node.climb()][::-1])
        self._young.note(namespace, key, node.end)
        if self._young.units > self._capacity:
            self._old, self._young = self._young, Edges(self._unit_bytes)

    def shared(self, namespace: str, key: bytes) -> int:
        """Return the depth up to which `key` is also the prefix of another remembered key."""
        return max(self._young.shared(namespace, key), self._old.shared(namespace, key))

    def depth(self, namespace: str, key: bytes, limit: int) -> int:
        """Return the length of the longest remembered prefix of `key`, at most `limit`."""
        return max(self._young.depth(namespace, key, limit), self._old.depth(namespace, key, limit))

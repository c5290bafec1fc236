"""Nodes in the order of a key, checked only when the first of them is needed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from headwater.cache.node import Node

Rank = tuple[float, ...]
Key = TypeVar("Key", int, Rank)


class LazyHeap(Generic[Key]):
    """A heap of (key, serial, node): the lowest key first, of equal keys the older node.

    `put` sets a node's key, to a higher or a lower one. `add` reads it with `key_of`: refreshing such a node costs
    nothing, but its key may only grow while it is queued. An entry that is out of date, or whose node is no candidate,
    is put right or removed when it comes to the top; queue the node again when it may have become a candidate.
    """

    def __init__(self, is_candidate: Callable[[Node], bool], key_of: Callable[[Node], Key] | None = None) -> None:
        self._is_candidate = is_candidate
        self._key_of: Callable[[Node], Key] | None = key_of
        self._heap: list[tuple[Key, int, Node]] = []
        self._keys: dict[Node, Key] = {}
        self._sweep_at = 64

    def add(self, node: Node) -> None:
        """Queue the node by `key_of`, unless it is queued."""
        if node not in self._keys:
            assert self._key_of is not None, "`put` takes the key of a heap without `key_of`"
            self._push(node, self._key_of(node))

    def put(self, node: Node, key: Key) -> None:
        """Queue the node by `key`, which replaces the key that it had."""
        if self._keys.get(node) != key:
            self._push(node, key)

    def discard(self, node: Node) -> None:
        """Remove the node, if it is queued."""
        self._keys.pop(node, None)

    def lowest(self) -> Node | None:
        """Return the candidate with the lowest key, of equals the one with the lowest serial. It stays queued."""
        heap, keys = self._heap, self._keys
        while heap:
            key, serial, node = heap[0]
            if keys.get(node) != key:
                heappop(heap)
            elif not self._is_candidate(node):
                heappop(heap)
                del keys[node]
            elif self._key_of is None or (current := self._key_of(node)) == key:
                return node
            else:
                keys[node] = current
                heapreplace(heap, (current, serial, node))
        return None

    def _push(self, node: Node, key: Key) -> None:
        self._keys[node] = key
        heappush(self._heap, (key, node.serial, node))
        if len(self._heap) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Drop all entries that are out of date, and all nodes that are no candidates now."""
        self._keys = {node: key for node, key in self._keys.items() if self._is_candidate(node)}
        self._heap = [(key, node.serial, node) for node, key in self._keys.items()]
        heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + 64

"""Nodes in the order of a key, checked only when the first is needed; and leaves in LRU order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Generic, TypeVar

from headwater.cache.eviction.base.policy import Kind, Victim
from headwater.cache.node import Node, is_free_leaf

Rank = tuple[float, ...]
Key = TypeVar("Key", int, Rank)
MAX_WAITING_NODES = 64  # that are not queued yet


class LazyHeap(Generic[Key]):
    """A heap of (key, serial, node): the lowest key first, of equal keys the older node.

    `put` sets a node's key, to a higher or a lower one. `add` reads it with `key_of`: refreshing such a node costs
    nothing, but its key may only grow while it is queued. An entry that is out of date, or whose node is not a
    candidate, is put right or removed when it comes to the top; queue the node again when it may have become one.
    """

    def __init__(self, is_candidate: Callable[[Node], bool], key_of: Callable[[Node], Key] | None = None) -> None:
        self._is_candidate = is_candidate
        self._key_of: Callable[[Node], Key] | None = key_of
        self._heap: list[tuple[Key, int, Node]] = []
        self._keys: dict[Node, Key] = {}
        self._sweep_at = 64
        self._added: list[Node] = []  # not queued yet: most nodes change again before the first one is needed

    def add(self, node: Node) -> None:
        """Queue the node by `key_of`, unless it is queued or not a candidate."""
        self._added.append(node)
        if len(self._added) > MAX_WAITING_NODES:
            self._queue_added()

    def _queue_added(self) -> None:
        assert self._key_of is not None, "`put` takes the key of a heap without `key_of`"
        for node in self._added:
            if node not in self._keys and self._is_candidate(node):
                self._push(node, self._key_of(node))
        self._added.clear()

    def put(self, node: Node, key: Key) -> None:
        """Queue the node by `key`, which replaces the key that it had."""
        if self._keys.get(node) != key:
            self._push(node, key)

    def discard(self, node: Node) -> None:
        """Remove the node, if it was queued by `put`."""
        self._keys.pop(node, None)

    def lowest(self) -> Node | None:
        """Return the candidate with the lowest key, of equals the one with the lowest serial. It stays queued."""
        if self._added:
            self._queue_added()
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
        """Drop all entries that are out of date, and all nodes that are not candidates now."""
        self._keys = {node: key for node, key in self._keys.items() if self._is_candidate(node)}
        self._heap = [(key, node.serial, node) for node, key in self._keys.items()]
        heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + 64


def is_bare_leaf(node: Node) -> bool:
    """Return whether KV of the node can be evicted now."""
    return node.checkpoint is None and is_free_leaf(node)


def bare_leaves() -> LazyHeap[int]:
    """Return a heap of the unpinned leaves without checkpoint, by the time of their KV's last use."""
    return LazyHeap[int](is_bare_leaf, attrgetter("kv_time"))


class Leaves:
    """Unpinned leaves by the time of their KV's last use: KV is evicted from the leaves to the root.

    A leaf with a checkpoint loses the checkpoint first.
    """

    def __init__(self) -> None:
        by_time = attrgetter("kv_time")
        self._bare = bare_leaves()
        self._kept = LazyHeap[int](lambda node: node.checkpoint is not None and is_free_leaf(node), by_time)

    def changed(self, node: Node) -> None:
        if is_free_leaf(node):
            (self._bare if node.checkpoint is None else self._kept).add(node)

    def bare(self) -> Node | None:
        """Return the oldest leaf without checkpoint."""
        return self._bare.lowest()

    def oldest(self) -> Victim | None:
        """Return the oldest leaf's checkpoint, or its tail if it has none."""
        bare, kept = self.bare(), self._kept.lowest()
        if kept is None:
            return None if bare is None else (bare, Kind.TAIL)
        if bare is None or (kept.kv_time, kept.serial) < (bare.kv_time, bare.serial):
            return kept, Kind.CHECKPOINT
        return bare, Kind.TAIL

"""LRU as in the baselines of Marconi's evaluation: a request refreshes every checkpoint on its path."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.eviction.base.lazy_heap import LazyHeap, Leaves
from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.node import Node, is_free_leaf
from headwater.plan import CacheLayout


class LruPath(Eviction):
    """The leaf whose path was used longest ago loses its checkpoint and all KV of its edge (vLLM+, SGLang+).

    A node and its checkpoint have one time, refreshed along the whole path (Marconi, section 5.1, baselines). While
    there is an unpinned leaf, only leaves go, and nodes with one child keep their checkpoint. In split pools
    checkpoints go by that time, at any node, and KV leaf to root. Speculative checkpoints go before all others.
    """

    def __init__(self, layout: CacheLayout) -> None:
        by_time = attrgetter("kv_time")
        self._speculative = LazyHeap[int](lambda node: node.speculative and not node.holds, by_time)
        self._checkpoints = LazyHeap[int](lambda node: node.checkpoint is not None and not node.holds, by_time)
        self._ends = LazyHeap[int](is_free_leaf, by_time)
        self._leaves = Leaves()

    def changed(self, node: Node) -> None:
        self._leaves.changed(node)
        if is_free_leaf(node):
            self._ends.add(node)
        if node.checkpoint is not None:
            self._checkpoints.add(node)
        if node.speculative:
            self._speculative.add(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is Room.KV:
            return self._leaves.oldest()
        speculative = self._speculative.lowest()
        if speculative is None and room is Room.ANY and (leaf := self._ends.lowest()) is not None:
            return leaf, Kind.NODE
        node = speculative or self._checkpoints.lowest()
        return None if node is None else (node, Kind.CHECKPOINT)

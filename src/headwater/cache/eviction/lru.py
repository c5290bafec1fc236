"""LRU: the least recently used goes, in two orders, one of KV and one of checkpoints."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.eviction.base.lazy_heap import LazyHeap, Leaves
from headwater.cache.eviction.base.policy import Eviction, Kind, Room, Victim
from headwater.cache.node import Node
from headwater.plan import CacheLayout


class Lru(Eviction):
    """Oldest last use goes: of KV, refreshed along the matched path; of checkpoints, refreshed only by a resumption.

    These are the two queues of the Alibaba article. With `prefer_dead`, KV that no checkpoint at or below it can use
    goes before all else. Speculative checkpoints go before other checkpoints.
    """

    keeps_history = False

    def __init__(self, layout: CacheLayout, prefer_dead: bool = True) -> None:
        self._prefer_dead = prefer_dead
        by_time = attrgetter("checkpoint_time")
        self._speculative = LazyHeap[int](lambda node: node.speculative and not node.holds, by_time)
        self._checkpoints = LazyHeap[int](_may_lose_checkpoint, by_time)
        self._leaves = Leaves()

    def changed(self, node: Node) -> None:
        if node.checkpoint is not None:
            self.touched(node)
        self._leaves.changed(node)

    def touched(self, node: Node) -> None:
        if node.speculative:
            self._speculative.add(node)
        elif node.checkpoint is not None:
            self._checkpoints.add(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is Room.STATE:
            return self._checkpoint()
        bare = self._leaves.bare()
        if bare is not None and self._prefer_dead:
            return bare, Kind.TAIL
        if room is Room.ANY and (self._prefer_dead or self._speculative.lowest() is not None):
            return self._checkpoint() or self._leaves.oldest()
        leaf = self._leaves.oldest()
        if room is Room.ANY:
            checkpoint = self._checkpoints.lowest()
            if checkpoint is not None and (leaf is None or checkpoint.checkpoint_time < leaf[0].kv_time):
                return checkpoint, Kind.CHECKPOINT
        return leaf

    def _checkpoint(self) -> Victim | None:
        node = self._speculative.lowest() or self._checkpoints.lowest()
        return None if node is None else (node, Kind.CHECKPOINT)


def _may_lose_checkpoint(node: Node) -> bool:
    return node.checkpoint is not None and not (node.speculative or node.holds)

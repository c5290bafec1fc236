"""Least recently used, with two orders: KV by its own time, checkpoints by theirs (the Alibaba article's queues)."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.node import Node
from headwater.cache.order import Kind, Room, Victim
from headwater.cache.order.age_queue import AgeQueue
from headwater.cache.order.leaves import Leaves
from headwater.cache.order.recency_log import RecencyLog
from headwater.plan import CacheLayout


class Lru:
    """A checkpoint's time is refreshed only where work resumed at it, KV's along the whole matched path.

    With `prefer_dead`, KV that no checkpoint at or below it can use goes before anything that is of use.
    Speculative checkpoints go before all others.
    """

    keeps_history = False

    def __init__(self, layout: CacheLayout, prefer_dead: bool = True) -> None:
        self._prefer_dead = prefer_dead
        self._speculative = AgeQueue(attrgetter("checkpoint_time"), lambda node: node.speculative and not node.holds)
        self._checkpoints = RecencyLog(lambda node: not node.holds)
        self._leaves = Leaves()

    def changed(self, node: Node) -> None:
        if node.checkpoint is None:
            self._checkpoints.discard(node)
        else:
            self.touched(node)
        self._leaves.changed(node)

    def touched(self, node: Node) -> None:
        """Note a checkpoint's time; KV's is read when it is needed."""
        if node.speculative:
            self._speculative.add(node)
        elif node.checkpoint is not None:
            self._checkpoints.note(node, node.checkpoint_time)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is Room.STATE:
            return self._checkpoint()
        bare = self._leaves.bare()
        if bare is not None and self._prefer_dead:
            return bare, Kind.TAIL
        if room is Room.ANY and (self._prefer_dead or self._speculative.oldest() is not None):
            return self._checkpoint() or self._leaves.oldest()
        leaf = self._leaves.oldest()
        if room is Room.ANY:
            checkpoint = self._checkpoints.oldest()
            if checkpoint is not None and (leaf is None or checkpoint.checkpoint_time < leaf[0].kv_time):
                return checkpoint, Kind.CHECKPOINT
        return leaf

    def surplus(self, node: Node, now: int) -> Victim | None:
        return None

    def _checkpoint(self) -> Victim | None:
        node = self._speculative.oldest() or self._checkpoints.oldest()
        return None if node is None else (node, Kind.CHECKPOINT)

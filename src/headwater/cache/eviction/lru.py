"""Least recently used, with two orders: KV by its own time, checkpoints by theirs (the Alibaba article's queues)."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.eviction.age_queue import AgeQueue
from headwater.cache.eviction.policy import Kind, Room, Victim
from headwater.cache.index import Node


class Lru:
    """A checkpoint's time is refreshed only where work resumed at it, KV's along the whole matched path.

    With `prefer_dead`, KV that no checkpoint at or below it can use goes before anything that is of use.
    Speculative checkpoints go before all others.
    """

    def __init__(self, prefer_dead: bool = True) -> None:
        self._prefer_dead = prefer_dead
        self._speculative = AgeQueue(attrgetter("checkpoint_time"))
        self._checkpoints = AgeQueue(attrgetter("checkpoint_time"))
        self._bare = AgeQueue(attrgetter("kv_time"))  # leaves without checkpoint: all that is below them is gone
        self._leaves = AgeQueue(attrgetter("kv_time"))  # leaves with one

    def changed(self, node: Node) -> None:
        kept = node.checkpoint is not None
        free = kept and not node.holds
        leaf = node.parent is not None and not node.children and not node.pins
        self._speculative.put(node, free and node.speculative)
        self._checkpoints.put(node, free and not node.speculative)
        self._bare.put(node, leaf and not kept)
        self._leaves.put(node, leaf and kept)

    def touched(self, node: Node) -> None:
        """The queues read times when they need them."""

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is Room.STATE:
            return self._checkpoint()
        bare = self._bare.oldest()
        if bare is not None and self._prefer_dead:
            return bare, Kind.TAIL
        if room is Room.ANY and (self._prefer_dead or self._speculative):
            return self._checkpoint() or self._leaf(bare)
        leaf = self._leaf(bare)
        if room is Room.ANY:
            checkpoint = self._checkpoints.oldest()
            if checkpoint is not None and (leaf is None or checkpoint.checkpoint_time < leaf[0].kv_time):
                return checkpoint, Kind.CHECKPOINT
        return leaf

    def _checkpoint(self) -> Victim | None:
        node = self._speculative.oldest() or self._checkpoints.oldest()
        return None if node is None else (node, Kind.CHECKPOINT)

    def _leaf(self, bare: Node | None) -> Victim | None:
        """The leaf with the oldest KV; one with a checkpoint loses that first."""
        kept = self._leaves.oldest()
        if kept is None:
            return None if bare is None else (bare, Kind.TAIL)
        if bare is None or (kept.kv_time, kept.serial) < (bare.kv_time, bare.serial):
            return kept, Kind.CHECKPOINT
        return bare, Kind.TAIL

"""Least recently used as the baselines of Marconi's evaluation have it: whoever is passed is refreshed."""

from __future__ import annotations

from operator import attrgetter

from headwater.cache.node import Node
from headwater.cache.order import Kind, Room, Victim
from headwater.cache.order.age_queue import AgeQueue
from headwater.cache.order.leaves import Leaves, is_free_leaf
from headwater.plan import CacheLayout


class LruPath:
    """The leaf whose path was used longest ago loses its checkpoint and all KV of its edge (vLLM+, SGLang+).

    A node and its checkpoint have one time, refreshed along the whole path (Marconi, section 5.1, baselines). Only
    leaves go, and nodes with one child keep their checkpoint, while there is an unpinned leaf. In split pools
    checkpoints go by that time, at any node, and KV leaf to root. Speculative checkpoints go before all others.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout) -> None:
        by_time = attrgetter("kv_time")
        self._speculative = AgeQueue(by_time, lambda node: node.speculative and not node.holds)
        self._checkpoints = AgeQueue(by_time, lambda node: node.checkpoint is not None and not node.holds)
        self._ends = AgeQueue(by_time, is_free_leaf)
        self._leaves = Leaves()

    def changed(self, node: Node) -> None:
        self._leaves.changed(node)
        if is_free_leaf(node):
            self._ends.add(node)
        if node.checkpoint is not None:
            self._checkpoints.add(node)
        if node.speculative:
            self._speculative.add(node)

    def touched(self, node: Node) -> None:
        """Times are read when they are needed."""

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is Room.KV:
            return self._leaves.oldest()
        guess = self._speculative.oldest()
        if guess is None and room is Room.ANY and (leaf := self._ends.oldest()) is not None:
            return leaf, Kind.NODE
        node = guess or self._checkpoints.oldest()
        return None if node is None else (node, Kind.CHECKPOINT)

    def surplus(self, node: Node, now: int) -> Victim | None:
        return None

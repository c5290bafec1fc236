"""Greedy dual size frequency (Cherkasova 1998): what is worth least for its size goes, and all else grows older."""

from __future__ import annotations

from headwater.cache.eviction.policy import Room, Victim
from headwater.cache.eviction.ranked import Ranked
from headwater.cache.eviction.ranking import Rank
from headwater.cache.eviction.worth import Worth
from headwater.cache.node import Node
from headwater.types import CacheLayout


class Gdsf(Ranked):
    """Lowest H = L + frequency x cost / size goes; L is the H of the last that went, as it was when the node was used.

    Frequency = 1 + requests that resumed there; cost = FLOPs saved over the nearest ancestor with a checkpoint; size
    = pages that go with it (`Worth`).
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(self._h, relative=True)
        self._worth = Worth(layout)
        self._age = 0.0  # L
        self._used: dict[Node, tuple[int, float]] = {}  # time of the last use, and L then
        self._chosen: tuple[Node, float] | None = None  # what was last asked to go, and its H

    def changed(self, node: Node) -> None:
        if node.checkpoint is None:
            self._used.pop(node, None)
            if self._chosen is not None and self._chosen[0] is node:
                self._age, self._chosen = max(self._age, self._chosen[1]), None
        super().changed(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        victim = super().victim(room, now)
        if victim is not None and victim[0].checkpoint is not None:
            self._chosen = victim[0], self._h(victim[0])[0]
        return victim

    def _h(self, node: Node) -> Rank:
        time, age = self._used.get(node, (-1, 0.0))
        if time != node.checkpoint_time:
            age = self._age
            self._used[node] = node.checkpoint_time, age
        return (age + (1 + node.hits) * self._worth.of(node),)

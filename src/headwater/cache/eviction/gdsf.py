"""GDSF, greedy dual size frequency (Cherkasova 1998): frequency times cost over size, plus an age."""

from __future__ import annotations

from headwater.cache.eviction.base.lazy_heap import Rank
from headwater.cache.eviction.base.ranked import Ranked
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.node import Node
from headwater.plan import CacheLayout


class Gdsf(Ranked):
    """Lowest H = L + frequency x cost / size goes. L is the H of the last victim, as of the node's last use.

    Frequency = 1 + requests that resumed there; cost = FLOPs saved over the nearest ancestor with a checkpoint; size
    = pages that go with it (`Worth`).
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(self._h, relative=True)
        self._worth = Worth(layout)
        self._age = 0.0  # L
        self._used: dict[Node, tuple[int, float, bool]] = {}  # time of the last use, L then, and whether speculative

    def changed(self, node: Node) -> None:
        if node.checkpoint is None and node in self._used:
            if node.end in node.lost and not self._used[node][2]:  # it was evicted in its turn, not replaced
                self._age = max(self._age, self._h(node)[0])
            del self._used[node]
        super().changed(node)

    def _h(self, node: Node) -> Rank:
        time, age, _ = self._used.get(node, (-1, 0.0, False))
        age = age if time == node.checkpoint_time else self._age
        self._used[node] = node.checkpoint_time, age, node.speculative
        return (age + (1 + node.hits) * self._worth.of(node),)

"""Clairvoyant: a bound for the lab. It knows the trace and evicts the latest next use, weighted by worth."""

from __future__ import annotations

from headwater.cache.eviction.base.lazy_heap import LazyHeap, Rank
from headwater.cache.eviction.base.policy import Victim
from headwater.cache.eviction.base.ranked import BareFirst
from headwater.cache.eviction.base.rows import Columns, OverDistance
from headwater.cache.eviction.base.worth import Worth, next_below
from headwater.cache.eviction.clairvoyant.future import Future, Users
from headwater.cache.node import Node, is_free_leaf
from headwater.plan import CacheLayout


class Clairvoyant(BareFirst):
    """Lowest (FLOPs saved over the nearest ancestor with a checkpoint / pages) / (next use - now) is evicted.

    Now and next use count requests. A checkpoint's next use is the first request that passes it and finds no deeper
    checkpoint on its own path. Checkpoints without a next use go first, the oldest use before the rest. Leaves without
    checkpoint go before all.
    For one request after the other: `foresee` before the first one, then `now_at(i)` before request i's match, which
    is the i-th of the future; all that is committed until the next `now_at` is on its key. Without a future it is LRU.
    KV without a checkpoint goes by its time, as under LRU, so it bounds nothing if work can resume at every page.
    A greedy bound: it does not search for the best set of checkpoints, which is a knapsack over a tree.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__()
        self._worth = Worth(layout)
        self._users = Users()
        self._used = Columns()  # with a next use
        self._unused, self._unused_leaves = LazyHeap[Rank](lambda node: not node.holds), LazyHeap[Rank](is_free_leaf)

    def foresee(self, future: Future) -> None:
        """Set the requests from number 0 on."""
        self._users = Users(future)

    def now_at(self, request: int) -> None:
        """Begin request number `request`."""
        for node in self._users.begin(request):
            self.place(node)

    def toggled(self, node: Node) -> None:
        for moved in (*next_below(node), *(() if node.checkpoint is not None else self._users.leave(node))):
            self.place(moved)

    def lowest(self, leaves: bool, now: int) -> Node | None:
        unused = (self._unused_leaves if leaves else self._unused).lowest()
        return unused or self._used.lowest(OverDistance(self._users.now), leaves)[2]

    def surplus(self, node: Node, now: int) -> Victim | None:
        """Return None, after giving each checkpoint on the committed path its next use."""
        for above in node.climb():
            if above.checkpoint is not None and not self._users.knows(above):
                for moved in self._users.enter(above):
                    self.place(moved)
        return None

    def place(self, node: Node) -> None:
        for table in (self._used, self._unused, self._unused_leaves):
            table.discard(node)
        if node.checkpoint is not None and not node.holds:
            leaf, user = is_free_leaf(node), self._users.of(node)
            if user is not None and not node.speculative:
                self._used.put(node, self._worth.of(node), user, leaf)
            else:
                rank = (0.0 if node.speculative else 1.0, node.checkpoint_time)
                self._unused.put(node, rank)
                if leaf:
                    self._unused_leaves.put(node, rank)

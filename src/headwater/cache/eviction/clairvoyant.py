"""The lab's bound: who knows the future gives up what is used last, weighed by what it saves."""

from __future__ import annotations

from headwater.cache.node import Node
from headwater.cache.order import Kind, Room, Victim
from headwater.cache.order.future import Future
from headwater.cache.order.leaves import Leaves, is_free_leaf
from headwater.cache.order.ranked import next_below
from headwater.cache.order.ranking import Ranking
from headwater.cache.order.urgency import Urgency
from headwater.cache.order.users import Users
from headwater.cache.order.worth import Worth
from headwater.plan import CacheLayout


class Clairvoyant:
    """Lowest (FLOPs saved over the nearest ancestor with a checkpoint / pages) / (next use - now) goes.

    Now and next use count requests. A checkpoint's next use is the first request that passes it and finds no deeper
    one on its own path; what nobody will use goes first, the oldest use before the rest. Bare leaves go before all.
    For one request after the other: `foresee` before the first one, then `now_at(i)` before request i's match, which
    is the i-th of the future; all that is committed until the next `now_at` is on its key. Without a future it is LRU.
    KV without a checkpoint goes by its time, as under LRU, so it bounds nothing where work can resume at every page.
    A greedy bound: it does not search for the best set of checkpoints, which is a knapsack over a tree.
    """

    keeps_history = True

    def __init__(self, layout: CacheLayout) -> None:
        self._worth = Worth(layout)
        self._users = Users()
        self._used = Urgency()
        self._unused, self._unused_leaves = Ranking(lambda node: not node.holds), Ranking(is_free_leaf)
        self._leaves = Leaves()
        self._bases: set[Node] = set()

    def foresee(self, future: Future) -> None:
        """Hand over what is asked for from request 0 on."""
        self._users = Users(future)

    def now_at(self, request: int) -> None:
        """Request `request` begins."""
        for node in self._users.begin(request):
            self._place(node)

    def changed(self, node: Node) -> None:
        self._place(node)
        if (node.checkpoint is not None) != (node in self._bases):
            self._bases ^= {node}
            for moved in (*next_below(node), *(() if node.checkpoint is not None else self._users.leave(node))):
                self._place(moved)

    def touched(self, node: Node) -> None:
        self._place(node)

    def victim(self, room: Room, now: int) -> Victim | None:
        if room is not Room.STATE and (bare := self._leaves.bare()) is not None:
            return bare, Kind.TAIL
        leaves = room is Room.KV
        node = (self._unused_leaves if leaves else self._unused).lowest()
        node = node or self._used.lowest(self._users.now, leaves)
        return None if node is None else (node, Kind.CHECKPOINT)

    def surplus(self, node: Node, now: int) -> Victim | None:
        """Nothing is; but what was saved on the way to `node` learns who comes next."""
        climb: Node | None = node
        while climb is not None:
            if climb.checkpoint is not None and not self._users.knows(climb):
                for moved in self._users.enter(climb):
                    self._place(moved)
            climb = climb.parent
        return None

    def _place(self, node: Node) -> None:
        for table in (self._used, self._unused, self._unused_leaves):
            table.discard(node)
        self._leaves.changed(node)
        if node.checkpoint is not None and not node.holds:
            leaf, user = is_free_leaf(node), self._users.of(node)
            if user is not None and not node.speculative:
                self._used.put(node, self._worth.of(node), user, leaf)
            else:
                rank = (0.0 if node.speculative else 1.0, node.checkpoint_time)
                self._unused.put(node, rank)
                if leaf:
                    self._unused_leaves.put(node, rank)

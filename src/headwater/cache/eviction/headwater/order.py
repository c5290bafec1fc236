"""Order of candidates for eviction by score: worth x index of reuse. The lowest is evicted first."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from headwater.cache.eviction.base.rows import MAX_SLICE_ROWS, Column, Numbers, view
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.eviction.headwater.classes import HELD, LEAF, SPECULATIVE
from headwater.cache.eviction.headwater.rates import BUCKETS, Aging, ReuseRates, bucket, buckets
from headwater.cache.node import Node

RANKED_FRACTION = 64  # 1/64 of the candidates, those with the lowest scores, is ranked
SPARE_A_SLICE = 8  # ranked candidates a slice of rows that are left when candidates are ranked again
PRIORITY_WEIGHTS = np.array([1.0, 4.0, 0.25])  # of scores in a namespace, by priority: 0, 1 and -1

ALL_ROWS = slice(None)

Entry = tuple[float, int, Node, bool]  # score, serial, node, and whether it was ranked


class Ranking:
    """The lowest of all scores at some moment, and those that changed since to one that is not above them.

    A node with a higher score than `bound` cannot be the lowest before the ranked ones are used up, so it is left out:
    most changes cost a comparison.
    """

    def __init__(self, bound: float = -1.0) -> None:
        """bound: the highest score that is ranked; below all scores if none is."""
        self.bound = bound
        self.left = 0  # ranked nodes that were neither changed nor removed since
        self._heap: list[Entry] = []
        self._entries: dict[Node, Entry] = {}  # the current one of each node; others are out of date

    def put(self, node: Node, score: float, is_ranked: bool = False) -> None:
        """Set the score of a node. is_ranked: it did not change."""
        self.discard(node)
        if score <= self.bound:
            self._entries[node] = entry = score, node.serial, node, is_ranked
            heappush(self._heap, entry)
            self.left += is_ranked

    def discard(self, node: Node) -> None:
        """Remove the node, if it is here."""
        if node in self._entries:
            self.left -= self._entries.pop(node)[3]

    def lowest(self) -> Node | None:
        """Return the node with the lowest score, of equals the older one; None if all ranked ones are used up."""
        if not self.left:
            return None
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][2]


class Candidates(Aging[Node]):
    """Class, uses, last use and worth of each checkpoint in memory.

    In a large table the lowest scores are ranked. Until they are used up, or the rates are renewed, all scores age, so
    the score of a candidate that is not ranked may be somewhat lower. A question for the lowest changes nothing.
    """

    seen: Numbers  # the node's hits that are counted as uses, modulo 256
    prefix: Numbers  # id of the prefix that ends here
    worth: Numbers  # infinite: the checkpoint is held
    leaf: Numbers  # 1: KV can be evicted, too

    def __init__(self, rates: ReuseRates, worth: Worth) -> None:
        super().__init__(rates, seen="B", prefix="q", worth="d", leaf="B")
        self._worth = worth
        self.changed = set[Node]()  # in this tick: their scores are not computed yet
        self.ranking = Ranking()
        self._next: Ranking | None = None  # that is being made
        self._has_hints = False
        self._preferred = Counter[int]()  # checkpoints with a priority other than 0, by the serial of their root
        self.root = array("q")  # serial of the root of the namespace; these three are columns from the first hint on
        self.until = array("d")  # second until which the checkpoint is retained
        self.priority = array("b")

    def take(self, node: Node, prefix: int, kind: int, uses: int) -> int:
        """Add a checkpoint; return its row. prefix: its id. uses: at most MAX_USES."""
        hints = (_root(node), 0.0, 0) if self._has_hints else ()
        return self.add(node, (kind, uses, node.checkpoint_time, 0, node.hits & 0xFF, prefix, 0.0, 0, *hints))

    def leave(self, node: Node, now: int) -> None:
        """Remove a checkpoint."""
        row = self.row_of[node]
        self.end_span(row, now)
        if self._has_hints:
            self._set_priority(row, 0)
        self.remove(node)
        self.changed.discard(node)
        self.ranking.discard(node)
        if self._next is not None:
            self._next.discard(node)

    # ---- order

    def settle(self, now: int) -> None:
        """Rank the nodes that changed in this tick by their new scores. Most changed more than once in it."""
        for node in self.changed:
            row, mark = self.row_of[node], node.mark
            worth = np.inf if mark & HELD else 0.0 if mark & SPECULATIVE else self._worth.of(node)
            self.worth[row], self.leaf[row] = worth, mark & LEAF
            self.rank(node, row, now)
        self.changed.clear()

    def rank(self, node: Node, row: int, now: int) -> None:
        """Rank a node whose row changed."""
        age = now - self.time[row]
        cell = self.kind[row] * BUCKETS
        score = self.worth[row] * self._rates.index_of[cell if age < 2 else cell + bucket(age)]
        self.ranking.put(node, score)
        if self._next is not None:
            self._next.put(node, score)

    def is_used_up(self, now: int) -> bool:
        """Return whether candidates should be ranked again; in a large table some are left until that is done."""
        spare = len(self) // MAX_SLICE_ROWS * SPARE_A_SLICE
        if len(self) < 2 * RANKED_FRACTION or self.ranking.left > spare + len(self.changed):
            return False
        self.settle(now)  # ranked ones that changed are not left
        return self.ranking.left <= spare

    def rank_all(self, now: int) -> Iterator[int]:
        """Rank the lowest scores, in slices; yield the number of rows of each. The bound of many is that of a part."""
        number, step = len(self) // RANKED_FRACTION, -(-len(self) // MAX_SLICE_ROWS)
        if number <= 1:
            self.ranking = Ranking()
            return
        scores = self.scores(now, slice(None, None, step))
        last = max(1, number // step) - 1
        self._next = ranking = Ranking(float(np.partition(scores, last)[last]))
        for rows in self.slices():
            if step > 1:
                yield rows.stop - rows.start
                scores = self.scores(now, rows)
            for at in np.nonzero((scores <= ranking.bound) & (scores < np.inf))[0].tolist():
                ranking.put(self.keys[rows.start + at], float(scores[at]), is_ranked=True)
        yield len(scores)
        self.ranking, self._next = ranking, None

    def lowest(self, now: int, leaves: bool, clock: Callable[[], float]) -> Node | None:
        """Return the node with the lowest score, of all or of those whose KV can be evicted; of equals the older one.

        By hints another one of its namespace may be evicted instead.
        """
        lowest = None if leaves else self.ranking.lowest()
        if lowest is None:
            lowest = self._first(self.scores(now), self._leaves() if leaves else None)
        return lowest if lowest is None or not self._has_hints else self._hinted(lowest, now, leaves, clock())

    def _hinted(self, lowest: Node, now: int, leaves: bool, second: float) -> Node:
        """Return the node to evict instead of the lowest one: the lowest score x weight of its namespace.

        Nodes that are retained at that second are not evicted if there are others.
        """
        row = self.row_of[lowest]
        root = self.root[row]
        if self.until[row] <= second and root not in self._preferred:
            return lowest
        own = (view(self.root) == root) & (view(self.until) <= second)
        scores = self.scores(now) * PRIORITY_WEIGHTS[view(self.priority)]
        return self._first(scores, own & self._leaves() if leaves else own) or lowest

    def _leaves(self) -> Column:
        return view(self.leaf).astype(bool)

    def scores(self, now: int, rows: slice = ALL_ROWS) -> Column:
        """Return the score of each row."""
        cells = view(self.kind)[rows].astype(np.int64) * BUCKETS + buckets(now - view(self.time)[rows])
        scores: Column = view(self.worth)[rows] * self._rates.index.ravel()[cells]
        return scores

    def _first(self, scores: Column, allowed: Column | None = None) -> Node | None:
        """Return the node with the lowest finite score of the rows that are allowed, of equals the older one."""
        if allowed is not None:
            scores = np.where(allowed, scores, np.inf)
        lowest = scores.min(initial=np.inf)
        if lowest == np.inf:
            return None
        return min((self.keys[row] for row in np.nonzero(scores == lowest)[0].tolist()), key=lambda node: node.serial)

    # ---- hints

    def prefer(self, node: Node, priority: int, is_new: bool) -> None:
        """Set the priority of a checkpoint: of several requests that share it the highest counts."""
        if not priority and not self._preferred:
            return
        self._begin_hints()
        row = self.row_of[node]
        self._set_priority(row, priority if is_new else max(priority, self.priority[row]))

    def _set_priority(self, row: int, priority: int) -> None:
        root, before = self.root[row], self.priority[row]
        self.priority[row] = priority
        if bool(priority) != bool(before):
            self._preferred[root] += 1 if priority else -1
            if not self._preferred[root]:
                del self._preferred[root]

    def retain(self, node: Node, until: float) -> None:
        """Retain a checkpoint until that second, or for as long as it is retained already."""
        self._begin_hints()
        row = self.row_of[node]
        self.until[row] = max(self.until[row], until)

    def _begin_hints(self) -> None:
        if not self._has_hints:
            self._has_hints = True
            self.add_columns(self.root, self.until, self.priority)
            for row, node in enumerate(self.keys):
                self.root[row] = _root(node)

    def release(self, row: int) -> None:
        """End the retention of a row, if there is one."""
        if self._has_hints:
            self.until[row] = 0.0

    def retained(self, node: Node, second: float) -> list[Node]:
        """Return the nodes of this one's namespace that are retained at that second, the first to lapse first."""
        if not self._has_hints:
            return []
        until = view(self.until)
        rows = np.nonzero((view(self.root) == self.root[self.row_of[node]]) & (until > second))[0]
        return [self.keys[row] for row in rows[np.argsort(until[rows], kind="stable")]]


def _root(node: Node) -> int:
    """Return the serial of the root of the node's namespace."""
    *_, root = node.climb()
    return root.serial

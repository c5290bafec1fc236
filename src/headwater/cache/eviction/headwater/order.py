"""Order of candidates for eviction by score: worth x index of reuse. The lowest is evicted first."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from headwater.cache.eviction.base.rows import MAX_SLICE_ROWS, Column, Numbers, view
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.eviction.headwater.rates import (
    BUCKETS,
    HELD,
    LEAF,
    SPECULATIVE,
    Aging,
    ReuseRates,
    bucket,
    buckets,
)
from headwater.cache.node import Node

RANKED_FRACTION = 64  # 1/64 of the candidates, those with the lowest scores, is ranked
SPARE_A_SLICE = 8  # ranked candidates a slice of rows that are left when candidates are ranked again
PRIORITY_WEIGHTS = np.array([1.0, 4.0, 0.25])  # of scores in a namespace, by priority: 0, 1 and -1

ALL_ROWS = slice(None)

Run = tuple[list[Node], list[float]]  # nodes and their scores, the lowest last


class Ranking:
    """The lowest of all scores at some moment, and those that changed since to one that is not above them.

    A node with a higher score than `bound` cannot be the lowest before the ranked ones are used up, so it is left out:
    most changes cost a comparison. Ranked nodes are in sorted runs, and a heap has only the lowest of each run: the
    garbage collector would visit an entry for each node, 5 ms for 15,000 of them.
    """

    def __init__(self, bound: float = -1.0) -> None:
        """bound: the highest score that is ranked; below all scores if none is."""
        self.bound = bound
        self.ranked: dict[Node, float] = {}  # scores of ranked nodes that were neither changed nor removed since
        self._runs: list[Run] = []
        self._first: list[tuple[float, int, int]] = []  # heap: the lowest score of each run, its serial, the run
        self._changed: dict[Node, tuple[float, int, Node]] = {}  # current entries; others are out of date
        self._heap: list[tuple[float, int, Node]] = []  # of changed nodes: score, serial and node

    def rank(self, nodes: list[Node], scores: list[float]) -> None:
        """Add nodes that did not change, with scores that are not above the bound."""
        for node, score in zip(nodes, scores, strict=True):
            self._changed.pop(node, None)
            self.ranked[node] = score
        order = sorted(range(len(nodes)), key=lambda at: (scores[at], nodes[at].serial), reverse=True)
        self._runs.append(([nodes[at] for at in order], [scores[at] for at in order]))
        self._push(len(self._runs) - 1)

    def _push(self, number: int) -> None:
        nodes, scores = self._runs[number]
        if nodes:
            heappush(self._first, (scores[-1], nodes[-1].serial, number))

    def put(self, node: Node, score: float) -> None:
        """Set the score of a node, which changed."""
        if self.ranked.pop(node, None) is None:
            self._changed.pop(node, None)
        if score <= self.bound:
            self._changed[node] = entry = score, node.serial, node
            heappush(self._heap, entry)

    def discard(self, node: Node) -> None:
        """Remove the node, if it is here."""
        if self.ranked.pop(node, None) is None:
            self._changed.pop(node, None)

    def forget(self, number: int) -> None:
        """Remove some of the nodes: all of a large ranking at once take 2 ms."""
        if self._runs:
            self._runs.pop()
        for _ in range(min(number, len(self.ranked))):
            self.ranked.popitem()

    def lowest(self) -> Node | None:
        """Return the node with the lowest score, of equals the older one; None if all ranked ones are used up."""
        if not self.ranked:
            return None
        ranked, first, heap, changed = self.ranked, self._first, self._heap, self._changed
        nodes, scores = self._runs[first[0][2]]
        while ranked.get(nodes[-1]) != first[0][0]:
            nodes.pop()
            scores.pop()
            self._push(heappop(first)[2])
            nodes, scores = self._runs[first[0][2]]
        while heap and changed.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][2] if heap and heap[0] < first[0] else nodes[-1]


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
        self._last = Ranking()  # the one before, whose nodes are removed while the next one is made
        self._has_hints = False
        self._preferred = Counter[int]()  # checkpoints with a priority other than 0, by the serial of their root
        self.root = array("q")  # serial of the root of the namespace; these three are columns from the first hint on
        self.until = array("d")  # second until which the checkpoint is retained
        self.priority = array("b")

    def take(self, node: Node, prefix: int, kind: int, uses: int) -> int:
        """Add a checkpoint; return its row. prefix: its id. uses: at most MAX_USES."""
        hints = ([*node.climb()][-1].serial, 0.0, 0) if self._has_hints else ()
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
        if not self.changed:
            return
        row_of, worth_of, index_of = self.row_of, self._worth.of, self._rates.index_of
        worths, leaves, times, kinds = self.worth, self.leaf, self.time, self.kind
        rankings = (self.ranking,) if self._next is None else (self.ranking, self._next)
        for node in self.changed:
            row, mark = row_of[node], node.mark
            worth = worth_of(node) if not mark & (HELD | SPECULATIVE) else np.inf if mark & HELD else 0.0
            worths[row], leaves[row] = worth, mark & LEAF
            age = now - times[row]
            score = worth * index_of[kinds[row] * BUCKETS + (bucket(age) if age > 1 else 0)]
            for ranking in rankings:
                ranking.put(node, score)
        self.changed.clear()

    def is_used_up(self, now: int) -> bool:
        """Return whether candidates should be ranked again; in a large table some are left until that is done."""
        rows = len(self.keys)
        spare = rows // MAX_SLICE_ROWS * SPARE_A_SLICE
        if rows < 2 * RANKED_FRACTION or len(self.ranking.ranked) > spare + len(self.changed):
            return False
        self.settle(now)  # ranked ones that changed are not left
        return len(self.ranking.ranked) <= spare

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
            self._last.forget(MAX_SLICE_ROWS // RANKED_FRACTION)
            if step > 1:
                yield rows.stop - rows.start
                scores = self.scores(now, rows)
            low = ((scores <= ranking.bound) & (scores < np.inf)).nonzero()[0]
            ranking.rank([self.keys[row] for row in (low + rows.start).tolist()], scores[low].tolist())
        yield len(scores)
        self._last, self.ranking, self._next = self.ranking, ranking, None

    def lowest(self, now: int, leaves: bool, clock: Callable[[], float]) -> Node | None:
        """Return the node with the lowest score, of all or of those whose KV can be evicted; of equals the older one.

        By hints another one of its namespace may be evicted instead.
        """
        lowest = None if leaves else self.ranking.lowest()
        if lowest is None:
            lowest = self._first(self.scores(now), view(self.leaf) > 0 if leaves else None)
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
        return self._first(scores, own & (view(self.leaf) > 0) if leaves else own) or lowest

    def scores(self, now: int, rows: slice = ALL_ROWS) -> Column:
        """Return the score of each row."""
        cells = view(self.kind)[rows].astype(np.int64) * BUCKETS + buckets(now - view(self.time)[rows])
        scores: Column = view(self.worth)[rows] * self._rates.index.ravel()[cells]
        return scores

    def _first(self, scores: Column, allowed: Column | None = None) -> Node | None:
        """Return the node with the lowest finite score of the rows that are allowed, of equals the older one."""
        if allowed is not None:
            scores = np.where(allowed, scores, np.inf)
        lowest = np.nonzero((scores == scores.min(initial=np.inf)) & (scores < np.inf))[0]
        return min((self.keys[row] for row in lowest.tolist()), key=lambda node: node.serial, default=None)

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
                self.root[row] = [*node.climb()][-1].serial

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

"""Candidates for eviction by worth x index of reuse; their ages and uses teach the rates."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from headwater.cache.eviction.base.rows import Column, Numbers, view
from headwater.cache.eviction.headwater.ages import AGING, Aging
from headwater.cache.eviction.headwater.ranking import Entry, Ranking
from headwater.cache.eviction.headwater.rates import BUCKETS, ReuseRates, bucket, buckets
from headwater.cache.node import Node

RANKED = 64  # 1/64 of the rows is kept in order
WEIGHTS = np.array([1.0, 4.0, 0.25])  # of scores in a namespace, by priority: 0, 1 and -1


class Candidates(Aging[Node]):
    """Class, uses, last use and worth of each checkpoint in memory.

    In a large table the lowest scores are kept in order until they are used up or the rates are renewed; meanwhile
    they age, so another row's score may be somewhat lower. Only changes of the table change what is kept, so that a
    question for the lowest has no effect.
    """

    seen: Numbers  # the node's hits that are counted as uses, modulo 256
    prefix: Numbers  # id of the prefix that ends here
    worth: Numbers  # infinite: it may not go
    leaf: Numbers  # 1: KV may go, too

    def __init__(self, rates: ReuseRates) -> None:
        super().__init__(**AGING, seen="B", prefix="q", worth="d", leaf="B")
        self.rates = rates
        self.ranking = Ranking()
        self._has_hints = False
        self._preferred = Counter[int]()  # checkpoints with a priority other than 0, by the serial of their root
        self.root = array("q")  # serial of the root of the namespace; these three are columns from the first hint on
        self.until = array("d")  # second until which it is retained
        self.priority = array("b")

    # ---- ages and uses

    def take(self, node: Node, prefix: int, kind: int, uses: int) -> int:
        """Add a checkpoint; returns its row. prefix: its id. uses: at most MOST_USES."""
        row = self.add(node)
        self.prefix[row], self.kind[row], self.uses[row] = prefix, kind, uses
        self.time[row], self.seen[row] = node.checkpoint_time, node.hits & 0xFF
        if self._has_hints:
            self.root[row] = _root(node)
        return row

    def leave(self, node: Node, now: int) -> None:
        """Remove a checkpoint and its row, and rank the next lowest scores if those that were ranked are used up."""
        row = self.row_of[node]
        self._end_span(row, now)
        if self._has_hints:
            self._set_priority(row, 0)
        self.remove(node)
        self.ranking.discard(node)
        if self.ranking.lowest() is None:
            self.rank_all(now)

    def renew(self, now: int) -> None:
        """Renew the rates by the time until now, and all ranks by the rates."""
        self.watch(now)
        self.rates.renew()
        self.rank_all(now)

    # ---- order

    def rank(self, node: Node, row: int, now: int) -> None:
        """Rank a node whose row changed."""
        cell = self.kind[row] * BUCKETS + bucket(now - self.time[row])
        self.ranking.put(node, self.worth[row] * self.rates.index_of[cell])

    def rank_all(self, now: int) -> None:
        """Rank the lowest scores."""
        number = len(self) // RANKED
        self.ranking.begin(self.lowest_of(self.scores(now), number) if number > 1 else [])

    def lowest(self, now: int, leaves: bool, second: float) -> Node | None:
        """Return the node with the lowest score, of all or of those whose KV may go; of equals the older one.

        By hints another one of its namespace may go in its place, see `hinted`.
        """
        lowest = None if leaves else self.ranking.lowest()
        if lowest is None:
            lowest = self._first(self.scores(now, self._leaves() if leaves else None))
        return None if lowest is None else self.hinted(lowest, now, leaves, second)

    def hinted(self, lowest: Node, now: int, leaves: bool, second: float) -> Node:
        """Return what goes in the lowest node's place: the lowest score x weight of its namespace.

        What is retained at that second does not, if there is anything else.
        """
        if not self._has_hints:
            return lowest
        row = self.row_of[lowest]
        root = self.root[row]
        if self.until[row] <= second and root not in self._preferred:
            return lowest
        own = (view(self.root) == root) & (view(self.until) <= second)
        scores = self.scores(now, own & self._leaves() if leaves else own)
        return self._first(scores * WEIGHTS[view(self.priority)]) or lowest

    def _leaves(self) -> Column:
        return view(self.leaf).astype(bool)

    def lowest_allowed(self, now: int, allowed: Column) -> Node | None:
        """Return the node with the lowest score of the rows that are allowed; of equals the older one."""
        return self._first(self.scores(now, allowed))

    def _first(self, scores: Column) -> Node | None:
        lowest = self.lowest_of(scores, 1)
        return lowest[-1][-1] if lowest else None

    def scores(self, now: int, allowed: Column | None = None) -> Column:
        """Return the score of each row; of rows that are not allowed it is infinite."""
        cells = view(self.kind).astype(np.int64) * BUCKETS + buckets(now - view(self.time))
        scores: Column = view(self.worth) * self.rates.index.ravel()[cells]
        return scores if allowed is None else np.where(allowed, scores, np.inf)

    def lowest_of(self, scores: Column, number: int) -> list[Entry]:
        """Return the `number` lowest scores and those that equal one of them, the lowest last."""
        if not len(scores):
            return []
        bound = scores.min() if number == 1 else np.partition(scores, number - 1)[number - 1]
        rows = np.nonzero((scores <= bound) & (scores < np.inf))[0].tolist()
        nodes = [self.keys[row] for row in rows]
        found = [(score, node.serial, node) for score, node in zip(scores[rows].tolist(), nodes, strict=True)]
        return sorted(found, reverse=True)

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
            for row, kept in enumerate(self.keys):
                self.root[row] = _root(kept)

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

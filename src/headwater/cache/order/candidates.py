"""Candidates for eviction by worth x index of reuse; their ages and uses teach the rates."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import numpy as np

from headwater.cache.node import Node
from headwater.cache.order.rates import BUCKETS, ReuseRates, bucket, buckets
from headwater.cache.order.rows import WORD, Column, Numbers, Rows, view

MOST_USES = 255
RANKED = 64  # 1/64 of the rows is kept in order
Ranked = tuple[float, int, int, Node]  # score, serial and stamp


class Candidates(Rows):
    """Class, uses, last use and worth of each checkpoint.

    In a large table the lowest scores are kept in order until they are used up or the rates are renewed; meanwhile
    they age, so another row's score may be somewhat lower. Only changes of the table change what is kept, so that a
    question for the lowest has no effect.
    """

    kind: Numbers
    # 0: none; 1: its prompt's answer, or a prompt that would have taken it; else 1 more than requests; at most 255
    uses: Numbers
    time: Numbers  # of the last use
    since: Numbers  # since when it has its class
    worth: Numbers
    traits: Numbers  # of the node, as of the row's last change
    stamp: Numbers  # of that change

    def __init__(self, rates: ReuseRates) -> None:
        super().__init__(kind="h", uses="B", time="q", since="q", worth="d", traits="I", stamp="I")
        self.rates = rates
        self.root = array("q")  # serial of the root of the namespace; both are empty until something is retained
        self.until = array("d")  # second until which it is retained
        self._stamp = 0
        self._ranked: list[Ranked] = []  # the lowest one last
        self._changed: list[Ranked] = []  # rows that changed since the others were ranked, a heap

    # ---- ages and uses

    def take(self, node: Node, kind: int, time: int, uses: int) -> int:
        """Add a checkpoint that was taken or last used at `time`; returns its row."""
        row = self.add(node)
        self.kind[row], self.uses[row], self.time[row], self.since[row] = kind, min(uses, MOST_USES), time, time
        if self.root:
            self.root[row] = _root(node)
        return row

    def use(self, row: int, kind: int, uses: int, now: int) -> None:
        """Note that a request resumed there, and uses and class from now on."""
        age = now - self.time[row]
        self._end_span(row, now)
        self.rates.reused(self.kind[row], age)
        self.kind[row], self.time[row], self.since[row] = kind, now, now
        self.uses[row] = min(uses, MOST_USES)

    def change(self, row: int, kind: int, now: int) -> None:
        """Set the class from now on."""
        self._end_span(row, now)
        self.kind[row], self.since[row] = kind, now

    def remove(self, node: Node, row: int, now: int) -> None:
        """Remove a checkpoint and its row, and rank the next lowest scores if those that were ranked are used up."""
        self._end_span(row, now)
        self.discard(node)
        self._forget_ranked()
        if not self._ranked:
            self.rank_all(now)

    def renew(self, now: int) -> None:
        """Renew the rates by the time until now, and all ranks by the rates."""
        time, since = view(self.time), view(self.since)
        self.rates.watched_all(view(self.kind), since - time, now - time)
        since[:] = now
        self.rates.renew()
        self.rank_all(now)

    def _end_span(self, row: int, now: int) -> None:
        time = self.time[row]
        self.rates.watched(self.kind[row], self.since[row] - time, now - time)

    # ---- order

    def rank(self, row: int, worth: float, traits: int, now: int) -> None:
        """Set worth and traits of a row that changed. An infinite worth: it may not go. Odd traits: KV may go, too."""
        self._stamp = (self._stamp + 1) & WORD
        self.worth[row], self.traits[row], self.stamp[row] = worth, traits, self._stamp
        if self._ranked and worth != np.inf:
            node = self.nodes[row]
            score = worth * self.rates.index_of[self.kind[row] * BUCKETS + bucket(now - self.time[row])]
            heappush(self._changed, (score, node.serial, self._stamp, node))

    def rank_all(self, now: int) -> None:
        """Rank the lowest scores."""
        self._changed.clear()
        number = len(self) // RANKED
        self._ranked = self.lowest_of(self.scores(now), number) if number > 1 else []

    def lowest(self, now: int, leaves: bool, second: float) -> Node | None:
        """Return the node with the lowest score, of all or of those whose KV may go; of equals the older one.

        If it is retained at that second, the lowest of its namespace that is not goes in its place, if there is one.
        """
        self._forget_ranked()
        while self._changed and not self._holds(self._changed[0]):
            heappop(self._changed)
        if leaves or not self._ranked:
            lowest = self._first(self.scores(now, self._leaves() if leaves else None))
        else:
            lowest = min((self._ranked[-1], *self._changed[:1]))[-1]
        return None if lowest is None else self.unless_retained(lowest, now, leaves, second)

    def unless_retained(self, lowest: Node, now: int, leaves: bool, second: float) -> Node:
        """Return the node, or if it is retained the lowest of its namespace that is not, if there is one."""
        if not self.until or self.until[self.row[lowest]] <= second:
            return lowest
        others = (view(self.root) == self.root[self.row[lowest]]) & (view(self.until) <= second)
        return self._first(self.scores(now, others & self._leaves() if leaves else others)) or lowest

    def _leaves(self) -> Column:
        mask: Column = (view(self.traits) & 1).astype(bool)
        return mask

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

    def lowest_of(self, scores: Column, number: int) -> list[Ranked]:
        """Return the `number` lowest scores and those that equal one of them, the lowest last."""
        if not len(scores):
            return []
        bound = scores.min() if number == 1 else np.partition(scores, number - 1)[number - 1]
        rows = np.nonzero((scores <= bound) & (scores < np.inf))[0].tolist()
        found = [(float(scores[row]), self.nodes[row].serial, self.stamp[row], self.nodes[row]) for row in rows]
        return sorted(found, key=lambda one: one[:2], reverse=True)

    def _forget_ranked(self) -> None:
        """Drop entries whose row has changed or gone from the end that is read."""
        while self._ranked and not self._holds(self._ranked[-1]):
            self._ranked.pop()

    def _holds(self, ranked: Ranked) -> bool:
        row = self.row[ranked[-1]]
        return row >= 0 and self.stamp[row] == ranked[2]

    # ---- retention

    def retain(self, node: Node, until: float) -> None:
        """Retain a checkpoint until that second, or for as long as it is retained already."""
        if not self.until:
            self.begin(self.root, self.until)
            for row, kept in enumerate(self.nodes):
                self.root[row] = _root(kept)
        row = self.row[node]
        self.until[row] = max(self.until[row], until)

    def release(self, row: int) -> None:
        """End the retention of a row, if there is one."""
        if self.until:
            self.until[row] = 0.0

    def retained(self, node: Node, second: float) -> list[Node]:
        """Return the nodes of this one's namespace that are retained at that second, the first to lapse first."""
        if not self.until:
            return []
        until = view(self.until)
        rows = np.nonzero((view(self.root) == self.root[self.row[node]]) & (until > second))[0]
        return [self.nodes[row] for row in rows[np.argsort(until[rows], kind="stable")]]


def _root(node: Node) -> int:
    """Return the serial of the root of the node's namespace."""
    *_, root = node.climb()
    return root.serial

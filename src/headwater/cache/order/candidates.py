"""Candidates for eviction by worth x index of reuse; their ages and uses teach the rates."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from headwater.cache.node import Node
from headwater.cache.order.rates import BUCKETS, ReuseRates, bucket, buckets
from headwater.cache.order.table import Column, Rows

RANKED = 64  # 1/64 of the rows is kept in order
Ranked = tuple[float, int, int, Node]  # score, serial and stamp


class Candidates(Rows):
    """Class, uses, last use and worth of each checkpoint.

    In a large table the lowest scores are kept in order until they are used up or the rates are renewed; meanwhile
    they age, so another row's score may be somewhat lower. Only changes of the table change what is kept, so that a
    question for the lowest has no effect.
    """

    kind: Column
    uses: Column
    time: Column  # of the last use
    since: Column  # since when it has its class
    worth: Column
    leaf: Column
    stamp: Column  # of the row's last change
    root: Column  # serial of the root of its namespace
    until: Column  # second until which it is retained

    def __init__(self, rates: ReuseRates) -> None:
        whole = np.int64
        row = {"kind": np.int16, "uses": np.int32, "time": whole, "since": whole, "worth": float, "leaf": bool}
        super().__init__(**row, stamp=whole, root=whole, until=float)
        self.rates = rates
        self._stamp = 0
        self._ranked: list[Ranked] = []  # the lowest one last
        self._changed: list[Ranked] = []  # rows that changed since the others were ranked, a heap

    # ---- ages and uses

    def take(self, node: Node, kind: int, time: int, uses: int) -> int:
        """Add a checkpoint that was taken or last used at `time`; returns its row."""
        row = self.add(node)
        self.kind[row], self.uses[row], self.time[row], self.since[row] = kind, uses, time, time
        *_, root = node.climb()
        self.root[row], self.until[row] = root.serial, -np.inf
        return row

    def use(self, row: int, kind: int, now: int) -> None:
        """Note that work resumed there, and the class from now on."""
        age = now - int(self.time[row])
        self._end_span(row, now)
        self.rates.reused(int(self.kind[row]), age)
        self.kind[row], self.time[row], self.since[row] = kind, now, now
        self.uses[row] += 1

    def change(self, row: int, kind: int, now: int) -> None:
        """Set the class from now on."""
        self._end_span(row, now)
        self.kind[row], self.since[row] = kind, now

    def remove(self, node: Node, now: int) -> None:
        """Remove a checkpoint, and rank the next lowest scores if those that were ranked are used up."""
        self._end_span(self.row[node], now)
        self.discard(node)
        self._forget_changed()
        if not self._ranked:
            self.rank_all(now)

    def renew(self, now: int) -> None:
        """Renew the rates by the time until now, and all ranks by the rates."""
        count = len(self.nodes)
        kind, time, since = self.kind[:count], self.time[:count], self.since[:count]
        self.rates.watched_all(kind, since - time, now - time)
        since[:] = now
        self.rates.renew()
        self.rank_all(now)

    def _end_span(self, row: int, now: int) -> None:
        time = int(self.time[row])
        self.rates.watched(int(self.kind[row]), int(self.since[row]) - time, now - time)

    # ---- order

    def rank(self, row: int, worth: float, leaf: bool, now: int) -> None:
        """Set the worth, and whether KV may go, of a row that changed. An infinite worth: it may not go."""
        self._stamp += 1
        self.worth[row], self.leaf[row], self.stamp[row] = worth, leaf, self._stamp
        if self._ranked and worth != np.inf:
            node = self.nodes[row]
            score = worth * self.rates.index_of[self.kind[row]][bucket(now - int(self.time[row]))]
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
        self._forget_changed()
        if leaves or not self._ranked:
            lowest = self._first(self.scores(now, self.leaf if leaves else None))
        else:
            lowest = min((self._ranked[-1], *self._changed[:1]))[-1]
        if lowest is None or self.until[self.row[lowest]] <= second:
            return lowest
        others = (self.root == self.root[self.row[lowest]]) & (self.until <= second)
        return self._first(self.scores(now, others & self.leaf if leaves else others)) or lowest

    def _first(self, scores: Column) -> Node | None:
        lowest = self.lowest_of(scores, 1)
        return lowest[-1][-1] if lowest else None

    def retained(self, node: Node, second: float) -> list[Node]:
        """Return the nodes of this one's namespace that are retained at that second, the first to lapse first."""
        count = len(self)
        rows = np.nonzero((self.root[:count] == self.root[self.row[node]]) & (self.until[:count] > second))[0]
        return [self.nodes[row] for row in rows[np.argsort(self.until[rows], kind="stable")]]

    def scores(self, now: int, allowed: Column | None = None) -> Column:
        """Return the score of each row; of rows that are not allowed it is infinite."""
        count = len(self)
        cells = self.kind[:count].astype(np.int64) * BUCKETS + buckets(now - self.time[:count])
        scores: Column = self.worth[:count] * self.rates.index.ravel()[cells]
        return scores if allowed is None else np.where(allowed[:count], scores, np.inf)

    def lowest_of(self, scores: Column, number: int) -> list[Ranked]:
        """Return the `number` lowest scores and those that equal one of them, the lowest last."""
        if not len(scores):
            return []
        bound = scores.min() if number == 1 else np.partition(scores, number - 1)[number - 1]
        rows = np.nonzero((scores <= bound) & (scores < np.inf))[0].tolist()
        found = [(float(scores[row]), self.nodes[row].serial, int(self.stamp[row]), self.nodes[row]) for row in rows]
        return sorted(found, key=lambda one: one[:2], reverse=True)

    def _forget_changed(self) -> None:
        """Drop entries whose row has changed or gone from the ends that are read."""
        while self._ranked and not self._holds(self._ranked[-1]):
            self._ranked.pop()
        while self._changed and not self._holds(self._changed[0]):
            heappop(self._changed)

    def _holds(self, ranked: Ranked) -> bool:
        row = self.row.get(ranked[-1])
        return row is not None and int(self.stamp[row]) == ranked[2]

"""Candidates for eviction as columns of numbers, so that all of them are scored at once."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]


class Bounds(NamedTuple):
    """The least and the greatest number of both columns."""

    low: float
    high: float
    oldest: float
    newest: float


class Score(Protocol):
    """A score of all candidates; the lowest goes."""

    def into(self, score: Column, value: Column, time: Column, scratch: Column) -> None:
        """Write each row's score to `score`. `scratch` is as long as the columns."""


class OverDistance(NamedTuple):
    """Value divided by the time between `now` and a row's time, past or to come, at least 1."""

    now: int

    def into(self, score: Column, value: Column, time: Column, scratch: Column) -> None:
        """Write value / max(1, |time - now|) to `score`."""
        np.subtract(time, self.now, out=scratch)
        np.abs(scratch, out=scratch)
        np.maximum(scratch, 1.0, out=scratch)
        np.divide(value, scratch, out=score)


Lowest = tuple[float, int, Node | None]
NOTHING: Lowest = (np.inf, 0, None)


class Rows:
    """Nodes in rows of columns, without gaps: the last row fills a gap."""

    def __init__(self, **columns: type) -> None:
        """columns: names of the columns, which become attributes, and types of their numbers."""
        self.nodes: list[Node] = []
        self.row: dict[Node, int] = {}
        self._names = tuple(columns)
        for name, kind in columns.items():
            setattr(self, name, np.zeros(64, dtype=kind))

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, node: Node) -> int:
        """Add a row, whose numbers are undefined; returns it."""
        row = self.row[node] = len(self.nodes)
        self.nodes.append(node)
        for name in self._names:
            column: Column = getattr(self, name)
            if row == len(column):
                setattr(self, name, np.concatenate((column, column)))
        return row

    def discard(self, node: Node) -> None:
        """Remove the node's row, if it has one."""
        row = self.row.pop(node, None)
        if row is None:
            return
        last = self.nodes.pop()
        if last is not node:
            self.nodes[row] = last
            self.row[last] = row
            for name in self._names:
                column = getattr(self, name)
                column[row] = column[len(self.nodes)]


class Columns(Rows):
    """Value, time and a mark (whether KV may go, too) of each candidate."""

    value: Column
    time: Column
    leaf: Column
    score: Column  # of the last question
    scratch: Column

    def __init__(self) -> None:
        super().__init__(value=float, time=float, leaf=bool, score=float, scratch=float)

    def put(self, node: Node, value: float, time: int, leaf: bool) -> None:
        """Add the node, or replace its numbers. leaf: KV may go from it."""
        row = self.row.get(node)
        if row is None:
            row = self.add(node)
        self.value[row], self.time[row], self.leaf[row] = value, time, leaf

    def bounds(self, leaves: bool) -> Bounds | None:
        """Return the bounds of all rows, or of the leaves among them; None if there are none."""
        count = len(self.nodes)
        value, time = self.value[:count], self.time[:count]
        if leaves:
            mask = self.leaf[:count]
            value, time = value[mask], time[mask]
        if not len(value):
            return None
        low, high = np.minimum.reduce, np.maximum.reduce  # faster than min() and max() of an array
        return Bounds(float(low(value)), float(high(value)), float(low(time)), float(high(time)))

    def lowest(self, by: Score, leaves: bool = False) -> Lowest:
        """Return the least score, its node's serial and its node, of equals the lowest serial's.

        leaves: of nodes whose KV may go.
        """
        count = len(self.nodes)
        if not count:
            return NOTHING
        score = self.score[:count]
        by.into(score, self.value[:count], self.time[:count], self.scratch[:count])
        if leaves:
            score[~self.leaf[:count]] = np.inf
        least = score[score.argmin()]
        if least == np.inf:
            return NOTHING
        tied = [self.nodes[row] for row in (score == least).nonzero()[0]]
        node = tied[0] if len(tied) == 1 else min(tied, key=lambda node: node.serial)
        return float(least), node.serial, node

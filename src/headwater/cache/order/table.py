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


class Columns:
    """Value, time and a mark (whether KV may go, too) of each candidate, without gaps: the last row fills a gap."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._row: dict[Node, int] = {}
        self._value, self._time, self._leaf = np.zeros(64), np.zeros(64), np.zeros(64, dtype=bool)
        self._score, self._scratch = np.zeros(64), np.zeros(64)

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: Node, value: float, time: int, leaf: bool) -> None:
        """Add the node, or replace its numbers. leaf: KV may go from it."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self._nodes)
            self._nodes.append(node)
            if row == len(self._time):
                self._widen()
        self._value[row], self._time[row], self._leaf[row] = value, time, leaf

    def discard(self, node: Node) -> None:
        """Remove the node, if it is in the table."""
        row = self._row.pop(node, None)
        if row is None:
            return
        last = self._nodes.pop()
        if last is not node:
            end = len(self._nodes)
            self._nodes[row] = last
            self._row[last] = row
            for column in (self._value, self._time, self._leaf):
                column[row] = column[end]

    def bounds(self, leaves: bool) -> Bounds | None:
        """Return the bounds of all rows, or of the leaves among them; None if there are none."""
        count = len(self._nodes)
        value, time = self._value[:count], self._time[:count]
        if leaves:
            mask = self._leaf[:count]
            value, time = value[mask], time[mask]
        if not len(value):
            return None
        low, high = np.minimum.reduce, np.maximum.reduce  # faster than min() and max() of an array
        return Bounds(float(low(value)), float(high(value)), float(low(time)), float(high(time)))

    def lowest(self, by: Score, leaves: bool = False) -> Lowest:
        """Return the least score, its node's serial and its node, of equals the lowest serial's.

        leaves: of nodes whose KV may go.
        """
        count = len(self._nodes)
        if not count:
            return NOTHING
        score = self._score[:count]
        by.into(score, self._value[:count], self._time[:count], self._scratch[:count])
        if leaves:
            score[~self._leaf[:count]] = np.inf
        least = score[score.argmin()]
        if least == np.inf:
            return NOTHING
        tied = [self._nodes[row] for row in (score == least).nonzero()[0]]
        node = tied[0] if len(tied) == 1 else min(tied, key=lambda node: node.serial)
        return float(least), node.serial, node

    def _widen(self) -> None:
        self._value, self._time, self._leaf = (
            np.concatenate((column, column)) for column in (self._value, self._time, self._leaf)
        )
        self._score, self._scratch = np.zeros(len(self._time)), np.zeros(len(self._time))

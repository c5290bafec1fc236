"""Candidates for eviction as columns of numbers, so that all of them can be scored at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Recency:
    """How recent something is that was used `age` ago: of one, and of a column in place, times a factor."""

    of: Callable[[float], float]
    scale: Callable[[Column, float], object]


INVERSE_AGE = Recency(lambda age: 1 / age, lambda age, factor: np.divide(factor, age, out=age))
LINEAR = Recency(lambda age: -age, lambda age, factor: np.multiply(age, -factor, out=age))
RECENCIES = {"inverse_age": INVERSE_AGE, "linear": LINEAR}


class Bounds(NamedTuple):
    """Least and greatest of both columns."""

    low: float
    high: float
    oldest: float
    newest: float


class Scale(NamedTuple):
    """What brings value and recency to ranges of width 1, the value's then times its weight."""

    by_value: float
    by_recency: float
    recency: Recency
    now: int
    newest: float  # no time is beyond it


class Rows:
    """Value, time and a mark of each candidate, without holes: who leaves is replaced by the last one."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._row: dict[Node, int] = {}
        self._value, self._time, self._leaf = np.zeros(64), np.zeros(64), np.zeros(64, dtype=bool)
        self._score, self._scratch = np.zeros(64), np.zeros(64)

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: Node, value: float, time: int, leaf: bool) -> None:
        """Add the node, or set its numbers anew. leaf: KV may go from it."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self._nodes)
            self._nodes.append(node)
            if row == len(self._time):
                self._widen()
        self._value[row], self._time[row], self._leaf[row] = value, time, leaf

    def refresh(self, node: Node, time: int) -> None:
        self._time[self._row[node]] = time

    def value(self, node: Node) -> float:
        return float(self._value[self._row[node]])

    def discard(self, node: Node) -> None:
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
        """Of all rows, or of those that are leaves; None if there are none."""
        count = len(self._nodes)
        value, time = self._value[:count], self._time[:count]
        if leaves:
            mask = self._leaf[:count]
            value, time = value[mask], time[mask]
        if not len(value):
            return None
        low, high = np.minimum.reduce, np.maximum.reduce  # what min() and max() come to, in less time
        return Bounds(float(low(value)), float(high(value)), float(low(time)), float(high(time)))

    def lowest(self, scale: Scale, leaves: bool) -> tuple[float, int, Node] | None:
        """The least score, its node's serial and its node; of equals the lowest serial's. Ages are at least 1."""
        count = len(self._nodes)
        score, part = self._score[:count], self._scratch[:count]
        np.subtract(scale.now, self._time[:count], out=score)
        if scale.now <= scale.newest:
            np.maximum(score, 1.0, out=score)
        scale.recency.scale(score, scale.by_recency)
        np.multiply(self._value[:count], scale.by_value, out=part)
        np.add(score, part, out=score)
        if leaves:
            score[~self._leaf[:count]] = np.inf
        least = score[score.argmin()]
        if least == np.inf:
            return None
        tied = [self._nodes[row] for row in (score == least).nonzero()[0]]
        node = tied[0] if len(tied) == 1 else min(tied, key=lambda node: node.serial)
        return float(least), node.serial, node

    def _widen(self) -> None:
        self._value, self._time, self._leaf = (
            np.concatenate((column, column)) for column in (self._value, self._time, self._leaf)
        )
        self._score, self._scratch = np.zeros(len(self._time)), np.zeros(len(self._time))

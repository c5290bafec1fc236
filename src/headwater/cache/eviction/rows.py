"""Candidates for eviction as columns of numbers, so that all of them can be scored at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]
Bounds = tuple[float, float, float, float]


class Rows:
    """Length, time and a mark of each candidate, without holes: who leaves is replaced by the last one."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._row: dict[Node, int] = {}
        self._length, self._time, self._leaf = np.zeros(64), np.zeros(64), np.zeros(64, dtype=bool)
        self._score, self._scratch = np.zeros(64), np.zeros(64)

    def __contains__(self, node: Node) -> bool:
        return node in self._row

    def put(self, node: Node, length: int, time: int, leaf: bool) -> None:
        """Add the node, or set its numbers anew. leaf: KV may go from it."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self._nodes)
            self._nodes.append(node)
            if row == len(self._time):
                self._widen()
        self._length[row], self._time[row], self._leaf[row] = length, time, leaf

    def refresh(self, node: Node, time: int) -> None:
        self._time[self._row[node]] = time

    def length(self, node: Node) -> int:
        return int(self._length[self._row[node]])

    def discard(self, node: Node) -> None:
        row = self._row.pop(node, None)
        if row is None:
            return
        last = self._nodes.pop()
        if last is not node:
            end = len(self._nodes)
            self._nodes[row] = last
            self._row[last] = row
            for column in (self._length, self._time, self._leaf):
                column[row] = column[end]

    def bounds(self, leaves: bool) -> Bounds | None:
        """Least and greatest length, least and greatest time; None if there are no candidates."""
        length, time = self._length[: len(self._nodes)], self._time[: len(self._nodes)]
        if leaves:
            mask = self._leaf[: len(self._nodes)]
            length, time = length[mask], time[mask]
        if not len(length):
            return None
        return float(length.min()), float(length.max()), float(time.min()), float(time.max())

    def lowest(self, weights: tuple[float, float], now: int, newest: float, leaves: bool) -> tuple[float, int, Node]:
        """The least weights · (length, 1 / age), its node's serial and its node. Ages are at least 1.

        newest: no time is beyond it.
        """
        by_length, by_recency = weights
        count = len(self._nodes)
        score, part = self._score[:count], self._scratch[:count]
        np.subtract(now, self._time[:count], out=score)
        if now <= newest:
            np.maximum(score, 1.0, out=score)
        np.divide(by_recency, score, out=score)
        np.multiply(self._length[:count], by_length, out=part)
        np.add(score, part, out=score)
        if leaves:
            score[~self._leaf[:count]] = np.inf
        least = score[score.argmin()]
        tied = [self._nodes[row] for row in np.flatnonzero(score == least)]
        node = min(tied, key=lambda node: node.serial)
        return float(least), node.serial, node

    def _widen(self) -> None:
        self._length, self._time, self._leaf = (
            np.concatenate((column, column)) for column in (self._length, self._time, self._leaf)
        )
        self._score, self._scratch = np.zeros(len(self._time)), np.zeros(len(self._time))


def lowest(tables: list[Rows], w: float, now: int, leaves: bool) -> Node | None:
    """The node with the lowest w·minmax(length) + minmax(1/age) of all tables; of equals the one with least serial.

    What minmax subtracts is the same for all and left out.
    """
    bounded = [(rows, bounds) for rows in tables if (bounds := rows.bounds(leaves)) is not None]
    if not bounded:
        return None
    shortest, oldest = (min(bounds[at] for _, bounds in bounded) for at in (0, 2))
    longest, newest = (max(bounds[at] for _, bounds in bounded) for at in (1, 3))
    spread = longest - shortest
    recency = 1 / max(1.0, now - newest) - 1 / max(1.0, now - oldest)
    weights = (w / spread if spread else 0.0), (1 / recency if recency else 0.0)
    return min(rows.lowest(weights, now, newest, leaves) for rows, _ in bounded)[2]

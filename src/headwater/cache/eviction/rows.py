"""Candidates for eviction as columns of numbers, so that all of them can be scored at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.cache.index import Node

Column = np.ndarray[Any, np.dtype[Any]]


class Rows:
    """Length, time and two marks of each candidate, without holes: who leaves is replaced by the last one."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._row: dict[Node, int] = {}
        self._columns: dict[str, Column] = {
            "length": np.zeros(64),
            "time": np.zeros(64),
            "leaf": np.zeros(64, dtype=bool),
            "kept": np.zeros(64, dtype=bool),
        }
        self._scratch = np.zeros((2, 64))

    def __contains__(self, node: Node) -> bool:
        return node in self._row

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: Node, length: int, time: int, leaf: bool, kept: bool) -> None:
        """Add the node, or set its numbers anew. leaf: KV may go from it; kept: it has a checkpoint."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self._nodes)
            self._nodes.append(node)
            if row == len(self._scratch[0]):
                self._widen()
        columns = self._columns
        columns["length"][row] = length
        columns["time"][row] = time
        columns["leaf"][row] = leaf
        columns["kept"][row] = kept

    def refresh(self, node: Node, time: int) -> None:
        self._columns["time"][self._row[node]] = time

    def discard(self, node: Node) -> None:
        row = self._row.pop(node, None)
        if row is None:
            return
        last = self._nodes.pop()
        if last is not node:
            self._nodes[row] = last
            self._row[last] = row
            for column in self._columns.values():
                column[row] = column[len(self._nodes)]

    def lowest(self, w: float, now: int, mask: str | None) -> Node | None:
        """The node with the lowest w·minmax(length) + minmax(1/age), among those with the mark `mask`."""
        count = len(self._nodes)
        length, time = self._columns["length"][:count], self._columns["time"][:count]
        chosen = None
        if mask is not None:
            chosen = np.flatnonzero(self._columns[mask][:count])
            length, time = length[chosen], time[chosen]
        if not len(length):
            return None
        score = self._score(length, time, w, now)
        ties = np.flatnonzero(score == score.min())
        rows = ties if chosen is None else chosen[ties]
        tied: list[Node] = [self._nodes[row] for row in rows]
        return min(tied, key=lambda node: node.serial)

    def _score(self, length: Column, time: Column, w: float, now: int) -> Column:
        """The score but for a constant, which ranks nobody: minmax's subtrahends are left out."""
        score, by_length = self._scratch[0, : len(length)], self._scratch[1, : len(length)]
        np.subtract(now, time, out=score)
        np.maximum(score, 1.0, out=score)
        spread = 1.0 / score.min() - 1.0 / score.max()
        np.divide(1.0 / spread if spread else 0.0, score, out=score)
        spread = float(length.max() - length.min())
        np.multiply(length, w / spread if spread else 0.0, out=by_length)
        return np.add(score, by_length, out=score)

    def _widen(self) -> None:
        self._columns = {name: np.concatenate((column, column)) for name, column in self._columns.items()}
        self._scratch = np.concatenate((self._scratch, self._scratch), axis=1)

"""Checkpoints by what they are worth and how far off their use is, as columns: the order changes with time."""

from __future__ import annotations

import numpy as np

from headwater.cache.node import Node


class Urgency:
    """Worth, time of use and a mark of each candidate, without holes: who leaves is replaced by the last one."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._row: dict[Node, int] = {}
        self._columns = np.zeros((3, 64))

    def put(self, node: Node, worth: float, use: int, leaf: bool) -> None:
        """Add the node, or set its numbers anew. leaf: KV may go from it."""
        row = self._row.get(node)
        if row is None:
            row = self._row[node] = len(self._nodes)
            self._nodes.append(node)
            if row == self._columns.shape[1]:
                self._columns = np.concatenate((self._columns, self._columns), axis=1)
        self._columns[:, row] = worth, use, leaf

    def discard(self, node: Node) -> None:
        row = self._row.pop(node, None)
        if row is None:
            return
        last = self._nodes.pop()
        if last is not node:
            self._nodes[row] = last
            self._row[last] = row
            self._columns[:, row] = self._columns[:, len(self._nodes)]

    def lowest(self, now: int, leaves: bool) -> Node | None:
        """The node with the least worth / time to its use, past or to come; of equals the lowest serial's."""
        worth, use, leaf = self._columns[:, : len(self._nodes)]
        score = worth / np.maximum(np.abs(use - now), 1.0)
        if leaves:
            score[leaf == 0] = np.inf
        if not len(score) or (least := score.min()) == np.inf:
            return None
        return min((self._nodes[row] for row in np.flatnonzero(score == least)), key=lambda node: node.serial)

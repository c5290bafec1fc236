"""Rows of numbers, one for each node, in arrays: a few bytes a number, and all of a column at once for numpy."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]
Numbers: TypeAlias = "array[Any]"
SPREAD, WORD = 0x9E3779B1, 0xFFFFFFFF  # 2^32 / golden ratio: serials in a row get places far apart (Knuth, 6.4)
LEAST = 64  # places of the smallest table


class RowNumbers:
    """Row of each node: a hash table by serial with linear probing, of 6 to 12 bytes a node; a dict takes 60 to 100."""

    def __init__(self, nodes: list[Node]) -> None:
        """nodes: the node of each row, which the owner keeps up to date."""
        self._nodes = nodes
        self._empty(LEAST)

    def __getitem__(self, node: Node) -> int:
        """Return the node's row; -1 if it has none."""
        places, nodes = self._places, self._nodes
        row = places[at := (node.serial * SPREAD & WORD) >> self._shift]
        while row >= 0 and nodes[row] is not node:
            row = places[at := (at + 1) & self._mask]
        return row

    def __setitem__(self, node: Node, row: int) -> None:
        """Set the row of a node that has one, or of one that has none and is in this row already."""
        self._places[self._place(node)] = row

    def add(self) -> None:
        """Add the last of the nodes."""
        if 3 * len(self._nodes) > 2 * len(self._places):
            self._rebuild()
        else:
            self[self._nodes[-1]] = len(self._nodes) - 1

    def remove(self, node: Node) -> int:
        """Remove a node; return the row that it had, -1 if none. That row and all others have to be in place still."""
        places, mask = self._places, self._mask
        gap = at = self._place(node)
        found = places[gap]
        while (row := places[at := (at + 1) & mask]) >= 0:
            if (at - self._home(self._nodes[row])) & mask >= (at - gap) & mask:  # its probes pass the gap
                places[gap], gap = row, at
        places[gap] = -1
        return found

    def _home(self, node: Node) -> int:
        return (node.serial * SPREAD & WORD) >> self._shift

    def _place(self, node: Node) -> int:
        """Return the place of the node, or the empty one in which it would be."""
        places, nodes = self._places, self._nodes
        at = self._home(node)
        while (row := places[at]) >= 0 and nodes[row] is not node:
            at = (at + 1) & self._mask
        return at

    def _empty(self, size: int) -> None:
        self._places, self._mask = array("i", [-1]) * size, size - 1
        self._shift = 33 - size.bit_length()

    def _rebuild(self) -> None:
        """Double the table: nodes take the next empty place in the order of their first choices."""
        nodes = self._nodes
        self._empty(2 * len(self._places))
        homes = np.fromiter((self._home(node) for node in nodes), np.int64, len(nodes))
        rows = np.argsort(homes)
        steps = np.arange(len(nodes))
        at = np.maximum.accumulate(homes[rows] - steps) + steps
        inside = at <= self._mask
        view(self._places)[at[inside]] = rows[inside]
        for row in rows[~inside].tolist():
            self[nodes[row]] = row


class Rows:
    """Nodes in rows of columns, without gaps: the last row fills a gap."""

    def __init__(self, **columns: str) -> None:
        """columns: names of the columns, which become attributes, and type codes of their numbers (`array`)."""
        self.nodes: list[Node] = []
        self.row = RowNumbers(self.nodes)
        self._columns = tuple(array(code) for code in columns.values())
        for name, column in zip(columns, self._columns, strict=True):
            setattr(self, name, column)

    def __len__(self) -> int:
        return len(self.nodes)

    def begin(self, *columns: Numbers) -> None:
        """Add columns, which are empty, with zeros in all rows."""
        for column in columns:
            column.extend([0] * len(self))
        self._columns += columns

    def add(self, node: Node) -> int:
        """Add a row of zeros; returns it."""
        self.nodes.append(node)
        self.row.add()
        for column in self._columns:
            column.append(0)
        return len(self.nodes) - 1

    def discard(self, node: Node) -> None:
        """Remove the node's row, if it has one."""
        row = self.row.remove(node)
        if row >= 0:
            self._fill(row)

    def _fill(self, row: int) -> None:
        """Fill a row whose node has left the table with the last one."""
        last = self.nodes[-1]
        if row == len(self.nodes) - 1:
            for column in self._columns:
                column.pop()
        else:
            self.row[last] = row
            self.nodes[row] = last
            for column in self._columns:
                column[row] = column.pop()
        self.nodes.pop()


def view(column: Numbers) -> Column:
    """Return the column for numpy. While it is referred to, no row can be added or removed."""
    return np.frombuffer(column, column.typecode)

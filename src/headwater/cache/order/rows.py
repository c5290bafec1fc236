"""Rows of numbers in arrays, one for each key or node: a few bytes a number, and all of a column at once for numpy."""

from __future__ import annotations

from array import array
from typing import Any, Protocol, TypeAlias

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]
Numbers: TypeAlias = "array[Any]"
Entries: TypeAlias = "list[Any] | array[int]"
SPREAD, WORD = 0x9E3779B1, 0xFFFFFFFF  # 2^32 / golden ratio: serials in a row get places far apart (Knuth, 6.4)
LEAST = 64  # places of the smallest table


class Keys(Protocol):
    """The key of each row."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> int: ...


class Serials:
    """Serials of nodes as keys."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, row: int) -> int:
        return self._nodes[row].serial


class RowNumbers:
    """Row of each key: a hash table with linear probing, of 6 to 12 bytes a key; a dict takes 60 to 100."""

    def __init__(self, keys: Keys) -> None:
        """keys: of each row, which the owner keeps up to date."""
        self.keys = keys
        self._empty(LEAST)

    def __getitem__(self, key: int) -> int:
        """Return the key's row; -1 if it has none."""
        places, keys = self._places, self.keys
        row = places[at := (key * SPREAD & WORD) >> self._shift]
        while row >= 0 and keys[row] != key:
            row = places[at := (at + 1) & self._mask]
        return row

    def __setitem__(self, key: int, row: int) -> None:
        """Set the row of a key that has one, or of one that has none and is in this row already."""
        self._places[self._place(key)] = row

    def add(self) -> None:
        """Add the last of the keys."""
        last = len(self.keys) - 1
        if 3 * (last + 1) > 2 * len(self._places):
            self.rebuild()
        else:
            self[self.keys[last]] = last

    def remove(self, key: int) -> int:
        """Remove a key; return the row that it had, -1 if none. That row and all others have to be in place still."""
        places, mask = self._places, self._mask
        gap = at = self._place(key)
        found = places[gap]
        while (row := places[at := (at + 1) & mask]) >= 0:
            if (at - self._home(self.keys[row])) & mask >= (at - gap) & mask:  # its probes pass the gap
                places[gap], gap = row, at
        places[gap] = -1
        return found

    def _home(self, key: int) -> int:
        return (key * SPREAD & WORD) >> self._shift

    def _place(self, key: int) -> int:
        """Return the place of the key, or the empty one in which it would be."""
        places, keys = self._places, self.keys
        at = self._home(key)
        while (row := places[at]) >= 0 and keys[row] != key:
            at = (at + 1) & self._mask
        return at

    def _empty(self, size: int) -> None:
        self._places, self._mask = array("i", [-1]) * size, size - 1
        self._shift = 33 - size.bit_length()

    def rebuild(self) -> None:
        """Make the table anew, a third to two thirds full: keys take the next empty place in order of their homes."""
        keys, size = self.keys, LEAST
        while 3 * len(keys) > 2 * size:
            size *= 2
        self._empty(size)
        if isinstance(keys, array):
            homes = (view(keys).astype(np.uint64) * np.uint64(SPREAD) & np.uint64(WORD)).astype(np.int64) >> self._shift
        else:
            homes = np.fromiter((self._home(keys[row]) for row in range(len(keys))), np.int64, len(keys))
        rows = np.argsort(homes)
        steps = np.arange(len(keys))
        at = np.maximum.accumulate(homes[rows] - steps) + steps
        inside = at <= self._mask
        view(self._places)[at[inside]] = rows[inside]
        for row in rows[~inside].tolist():
            self[keys[row]] = row


class KeyedRows:
    """Entries in rows of columns, without gaps: the last row fills a gap."""

    def __init__(self, entries: Entries, numbers: RowNumbers, columns: dict[str, str]) -> None:
        """entries: empty yet. numbers: of them. columns: names, which become attributes, and codes of an `array`."""
        self._entries, self._row = entries, numbers
        self._columns = tuple(array(code) for code in columns.values())
        for name, column in zip(columns, self._columns, strict=True):
            setattr(self, name, column)

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, *columns: Numbers) -> None:
        """Add columns, which are empty, with zeros in all rows."""
        for column in columns:
            column.extend([0] * len(self))
        self._columns += columns

    def append(self, entry: Any) -> int:
        """Add a row of zeros; returns it."""
        self._entries.append(entry)
        self._row.add()
        for column in self._columns:
            column.append(0)
        return len(self) - 1

    def remove_row(self, key: int) -> None:
        """Remove the row of a key, if it has one."""
        row = self._row.remove(key)
        if row >= 0:
            self._fill(row)

    def _fill(self, row: int) -> None:
        """Fill a row whose entry has left the table with the last one."""
        last = len(self) - 1
        if row != last:
            self._row[self._row.keys[last]] = row
            self._entries[row] = self._entries[last]
        self._entries.pop()
        for column in self._columns:
            number = column.pop()
            if row != last:
                column[row] = number


class Rows(KeyedRows):
    """Rows whose entries are nodes."""

    def __init__(self, **columns: str) -> None:
        """columns: names of the columns, which become attributes, and type codes of their numbers (`array`)."""
        self.nodes: list[Node] = []
        super().__init__(self.nodes, RowNumbers(Serials(self.nodes)), columns)

    def row_of(self, node: Node) -> int:
        """Return the node's row; -1 if it has none."""
        return self._row[node.serial]

    def add(self, node: Node) -> int:
        """Add a row of zeros; returns it."""
        return self.append(node)

    def discard(self, node: Node) -> None:
        """Remove the node's row, if it has one."""
        self.remove_row(node.serial)


def view(column: Numbers) -> Column:
    """Return the column for numpy. While it is referred to, no row can be added or removed."""
    return np.frombuffer(column, column.typecode)

"""Rows of numbers in arrays, one for each key or candidate: read one by one in Python, or by columns in numpy."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from headwater.cache.node import Node

Column = np.ndarray[Any, np.dtype[Any]]
Numbers: TypeAlias = "array[Any]"
Key = TypeVar("Key", bound=Hashable)
MAX_SLICE_ROWS = 8_192  # that numpy handles at once: 0.2 ms


class Rows(Generic[Key]):
    """Columns with a row for each key, without gaps: the last row fills the gap of a removed one."""

    def __init__(self, **columns: str) -> None:
        """columns: names of the columns, which become attributes, and type codes of their numbers (`array`)."""
        self.keys: list[Key] = []
        self.row_of: dict[Key, int] = {}
        self._columns = tuple(array(code) for code in columns.values())
        for name, column in zip(columns, self._columns, strict=True):
            setattr(self, name, column)
        self._appends = tuple(column.append for column in self._columns)

    def __len__(self) -> int:
        return len(self.keys)

    def add_columns(self, *columns: Numbers) -> None:
        """Add empty columns, with zeros in all rows."""
        for column in columns:
            column.extend([0] * len(self))
        self._columns += columns
        self._appends = tuple(column.append for column in self._columns)

    def add(self, key: Key, numbers: Iterable[Any]) -> int:
        """Add a row for a key that has none, with a number for each column; return it."""
        row = self.row_of[key] = len(self.keys)
        self.keys.append(key)
        for append, number in zip(self._appends, numbers):  # noqa: B905 -- at each checkpoint: `strict` takes longer
            append(number)
        return row

    def remove(self, key: Key) -> None:
        """Remove the row of a key."""
        row, last = self.row_of.pop(key), self.keys.pop()
        if row == len(self.keys):
            for column in self._columns:
                column.pop()
        else:
            for column in self._columns:
                column[row] = column.pop()
            self.keys[row], self.row_of[last] = last, row

    def slices(self) -> Iterator[slice]:
        """Yield slices of rows, from the last one to the first, while rows may be added and removed.

        A row that fills a gap comes from behind: it has been in a slice before.
        """
        stop = len(self)
        while stop > 0:
            start = max(0, stop - MAX_SLICE_ROWS)
            yield slice(start, stop)
            stop = start


def view(column: Numbers) -> Column:
    """Return the column as numpy's. While it is referred to, no row can be added or removed."""
    return np.frombuffer(column, column.typecode)


class Bounds(NamedTuple):
    """The least and the greatest number of both columns."""

    low: float
    high: float
    oldest: float
    newest: float


class Score(Protocol):
    """A score of all candidates; the lowest is evicted."""

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


class Columns(Rows[Node]):
    """Value, time and a mark (whether KV can be evicted, too) of each candidate."""

    value: Numbers
    time: Numbers
    leaf: Numbers

    def __init__(self) -> None:
        super().__init__(value="d", time="d", leaf="B")
        self._score, self._scratch = np.empty(0), np.empty(0)

    def put(self, node: Node, value: float, time: int, leaf: bool) -> None:
        """Add the node, or replace its numbers. leaf: its KV can be evicted."""
        row = self.row_of.get(node)
        if row is None:
            self.add(node, (value, time, leaf))
        else:
            self.value[row], self.time[row], self.leaf[row] = value, time, leaf

    def discard(self, node: Node) -> None:
        """Remove the node, if it is a candidate."""
        if node in self.row_of:
            self.remove(node)

    def bounds(self, leaves: bool) -> Bounds | None:
        """Return the bounds of all rows, or of the leaves among them; None if there are none."""
        value, time = view(self.value), view(self.time)
        if leaves:
            mask = view(self.leaf) > 0
            value, time = value[mask], time[mask]
        if not len(value):
            return None
        low, high = np.minimum.reduce, np.maximum.reduce  # faster than min() and max() of an array
        return Bounds(float(low(value)), float(high(value)), float(low(time)), float(high(time)))

    def lowest(self, by: Score, leaves: bool = False) -> Lowest:
        """Return the least score, its node's serial and its node, of equals the lowest serial's.

        leaves: of nodes whose KV can be evicted.
        """
        count = len(self)
        if not count:
            return NOTHING
        if count > len(self._score):
            self._score, self._scratch = np.empty(2 * count), np.empty(2 * count)
        score = self._score[:count]
        by.into(score, view(self.value), view(self.time), self._scratch[:count])
        if leaves:
            score[view(self.leaf) == 0] = np.inf
        least = score[score.argmin()]
        if least == np.inf:
            return NOTHING
        tied = [self.keys[row] for row in (score == least).nonzero()[0]]
        node = tied[0] if len(tied) == 1 else min(tied, key=lambda node: node.serial)
        return float(least), node.serial, node

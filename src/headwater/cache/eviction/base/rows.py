"""Rows of numbers in arrays, one for each key: read one by one in Python, and a whole column at once by numpy."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

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

    def __len__(self) -> int:
        return len(self.keys)

    def add_columns(self, *columns: Numbers) -> None:
        """Add empty columns, with zeros in all rows."""
        for column in columns:
            column.extend([0] * len(self))
        self._columns += columns

    def add(self, key: Key, numbers: Iterable[Any]) -> int:
        """Add a row for a key that has none, with a number for each column; return it."""
        row = self.row_of[key] = len(self.keys)
        self.keys.append(key)
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)
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

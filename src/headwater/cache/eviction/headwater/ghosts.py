"""Ghost entries of checkpoints: what was evicted goes on to teach, and has its uses again when it is taken anew."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from headwater.cache.eviction.base.rows import Column, Numbers, view
from headwater.cache.eviction.headwater.ages import AGING, Aging
from headwater.cache.eviction.headwater.rates import ReuseRates

SLACK = 8  # 1/8 too many are kept for a while: to remove some takes as long as to remove many


def prefix_ids(key: bytes, unit_bytes: int, before: int) -> array[int]:
    """Return an id for the prefix that ends at each unit of `key`. before: id of the prefix that the key continues."""
    ids = array("q")
    for at in range(0, len(key) - unit_bytes + 1, unit_bytes):
        ids.append(before := hash((before, key[at : at + unit_bytes])))
    return ids


class Ghosts(Aging[int]):
    """Class, uses and last use of evicted checkpoints, by the id of their prefix."""

    last: Numbers  # when it was evicted, or used since

    def __init__(self, rates: ReuseRates) -> None:
        super().__init__(**AGING, last="q")
        self.rates = rates

    def put(self, prefix: int, kind: int, uses: int, time: int, now: int) -> None:
        """Add a checkpoint that is evicted now, whose time until then is counted elsewhere. time: of its last use."""
        row = self.row_of.get(prefix, -1)
        if row < 0:
            row = self.add(prefix)
        self.kind[row], self.uses[row], self.time[row] = kind, uses, time
        self.watched[row], self.last[row] = self._age(row, now), now

    def rows_of(self, prefixes: Iterable[int]) -> list[int]:
        """Return the row of each of the prefixes that has one, in their order."""
        return [row for row in map(self.row_of.get, prefixes) if row is not None]

    def use(self, row: int, kind: int, uses: int, now: int, counts: bool = True) -> None:
        super().use(row, kind, uses, now, counts)
        self.last[row] = now

    def take(self, prefix: int, now: int) -> int:
        """Remove a checkpoint that is taken anew; return its uses, 0 if it is not here."""
        row = self.row_of.get(prefix, -1)
        if row < 0:
            return 0
        uses: int = self.uses[row]
        self._end_span(row, now)
        self.remove(prefix)
        return uses

    def renew(self, most: int, now: int) -> None:
        """Count the time of all until now. If they are more than 9/8 of `most`, keep that many, the last used ones.

        To be evicted counts as a use here.
        """
        self.watch(now)
        if len(self) > most + most // SLACK:
            beyond = len(self) - most
            self._keep(np.sort(np.argpartition(view(self.last), beyond - 1)[beyond:]))

    def _keep(self, rows: Column) -> None:
        """Remove all other rows."""
        for column in self._columns:
            column[:] = array(column.typecode, view(column)[rows].tobytes())
        self.keys = [self.keys[row] for row in rows.tolist()]
        self.row_of = {prefix: row for row, prefix in enumerate(self.keys)}

"""Ghost entries of checkpoints: what was evicted goes on to teach, and has its uses again when it is taken anew."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from headwater.cache.order.ages import AGING, Aging
from headwater.cache.order.rates import ReuseRates
from headwater.cache.order.rows import view


def prefix_ids(key: bytes, unit_bytes: int, before: int) -> array[int]:
    """Return an id for the prefix that ends at each unit of `key`. before: id of the prefix that the key continues."""
    ids = array("q")
    for at in range(0, len(key) - unit_bytes + 1, unit_bytes):
        ids.append(before := hash((before, key[at : at + unit_bytes])))
    return ids


class Ghosts(Aging):
    """Class, uses and last use of evicted checkpoints, by the id of their prefix."""

    def __init__(self, rates: ReuseRates) -> None:
        self.prefixes = array("q")
        super().__init__(self.prefixes, self.prefixes, AGING)
        self.rates = rates

    def put(self, prefix: int, kind: int, uses: int, time: int, now: int) -> None:
        """Add a checkpoint that is evicted now; its time in memory was counted. time: of its last use."""
        row = self._row[prefix]
        if row < 0:
            row = self.append(prefix)
        self.kind[row], self.uses[row], self.time[row] = kind, uses, time
        self.watched[row] = self._age(row, now)

    def deepest(self, prefixes: Iterable[int]) -> int:
        """Return the row of the last of these prefixes that has one; -1 if none has."""
        return next((row for prefix in prefixes if (row := self._row[prefix]) >= 0), -1)

    def take(self, prefix: int, now: int) -> int:
        """Remove a checkpoint that is taken anew; return its uses, 0 if it is not here."""
        row = self._row[prefix]
        if row < 0:
            return 0
        uses: int = self.uses[row]
        self._end_span(row, now)
        self.remove_row(prefix)
        return uses

    def forget(self, most: int, now: int) -> None:
        """Remove those that were evicted or used the longest ago, until at most so many are left; count their time."""
        beyond = len(self) - most
        if beyond <= 0:
            return
        time, watched = view(self.time), view(self.watched).astype(np.int64)
        order = np.argpartition(time + watched, beyond - 1)
        gone = order[:beyond]
        self.rates.watched_all(view(self.kind)[gone], watched[gone], np.maximum(now - time[gone], watched[gone]))
        del time
        self.keep(np.sort(order[beyond:]))

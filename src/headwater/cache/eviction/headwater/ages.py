"""Ages of checkpoints, by which they teach the rates of reuse."""

from __future__ import annotations

import numpy as np

from headwater.cache.eviction.base.rows import Key, Numbers, Rows, view
from headwater.cache.eviction.headwater.rates import ReuseRates

AGING = {"kind": "h", "uses": "B", "time": "q", "watched": "I"}
MOST_USES, OLDEST = 255, 0xFFFFFFFF  # the greatest numbers in their columns


class Aging(Rows[Key]):
    """Rows of checkpoints with the columns `AGING`: each use, and the time until then, is counted for the class."""

    kind: Numbers  # class
    # 0: none; 1: its prompt's answer, or a prompt that would have taken it; else 1 more than requests; at most 255
    uses: Numbers
    time: Numbers  # of the last use
    watched: Numbers  # age until which its time is counted

    rates: ReuseRates

    def use(self, row: int, kind: int, uses: int, now: int, counts: bool = True) -> None:
        """Note that work resumed there, with uses and class from now on. counts: it was a request's."""
        self._end_span(row, now)
        if counts:
            self.rates.reused(self.kind[row], now - self.time[row])
        self.kind[row], self.uses[row], self.time[row], self.watched[row] = kind, uses, now, 0

    def change(self, row: int, kind: int, now: int) -> None:
        """Set the class from now on."""
        self._end_span(row, now)
        self.kind[row], self.watched[row] = kind, self._age(row, now)

    def watch(self, now: int) -> None:
        """Count the time of all until now."""
        ages, watched = np.maximum(now - view(self.time), 0), view(self.watched)
        self.rates.watched_all(view(self.kind), watched, ages)
        watched[:] = np.minimum(ages, OLDEST)

    def _age(self, row: int, now: int) -> int:
        age: int = min(max(0, now - self.time[row]), OLDEST)
        return age

    def _end_span(self, row: int, now: int) -> None:
        age, watched = now - self.time[row], self.watched[row]
        if age > watched:
            self.rates.watched(self.kind[row], watched, age)

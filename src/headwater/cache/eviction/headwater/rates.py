"""Rates of reuse by class and age, learned from traffic. An age is the time since the last use, in logical ticks."""

from __future__ import annotations

from array import array

import numpy as np

from headwater.cache.eviction.base.rows import Column, view

BUCKETS = 40  # of age: 1, 1.5, 2, 3, 4, 6 and so on; the last one has no end
EDGES = np.array([0.0, *(2.0 ** (b // 2) * (1 + b % 2 / 2) for b in range(1, BUCKETS)), np.inf])
WIDTHS = np.diff(np.append(EDGES[:-1], 2 * EDGES[-2]))
MIDDLES = np.maximum(1.0, EDGES[:-1] + WIDTHS / 2)
COARSE = 8  # a span shorter than 1/8 of its age counts in one bucket
MOST_REUSES = 15.0  # cap on the expected reuses in one bucket
FROM, UNTIL = np.triu_indices(BUCKETS)  # pairs of an edge and the edge after a bucket beyond it, less 1
FIRST = np.searchsorted(FROM, np.arange(BUCKETS))  # the first pair of each edge


def bucket(age: int) -> int:
    """Return the bucket of an age; ages below 1 count as 1."""
    if age < 2:
        return 0
    top = age.bit_length() - 1
    return 2 * top + (age >> (top - 1) & 1) if 2 * top < BUCKETS else BUCKETS - 1


def buckets(ages: Column) -> Column:
    """Return the bucket of each age."""
    exponent_and_half = np.maximum(ages, 1).astype(np.float32).view(np.int32) >> 22
    found: Column = np.minimum(exponent_and_half - (127 << 1), BUCKETS - 1)
    return found


class ReuseRates:
    """Reuses and time watched of each class in each bucket of age, and the index that follows from them.

    The rate of a cell is (reuses + n) / (time + n / expected): n reuses at the expected rate are assumed beside those
    that were seen. The expected rate of a class is that of its group, with n = `trust[1]`; that of a group is the
    prior, with n = `trust[0]`. Counts decay at each `renew`, so that a change of traffic is followed.

    The index of a class at an age is the highest rate of reuse per time in memory, over all ages until which one may
    keep it (Gittins 1979). With survival G and the expected time in memory C until an age, the rate between two ages
    is the slope of G over C.
    """

    def __init__(
        self, prior: Column, group: int, trust: tuple[float, float] = (0.5, 16.0), decay: float = 0.97
    ) -> None:
        """prior: reuses a tick, of each group (rows) in each bucket. group: number of classes in each."""
        self._prior, self._group, self._trust, self._decay = prior, group, trust, decay
        self._reuses, self._time = (np.zeros((len(prior) * group, BUCKETS)) for _ in range(2))
        self._spans = array("q")  # class, start and end, one span after the other
        self.renew()

    def reused(self, kind: int, age: int) -> None:
        """Note that one of a class was used at an age."""
        self._reuses[kind, bucket(age)] += 1

    def watched(self, kind: int, start: int, end: int) -> None:
        """Note that one was of a class between two ages."""
        if end > start:
            self._spans.extend((kind, start, end))

    def watched_all(self, kinds: Column, starts: Column, ends: Column) -> None:
        """Note spans of many, as `watched` does of one."""
        size, long, cells = self._time.size, ends - starts, kinds.astype(np.int64) * BUCKETS
        coarse = starts >= COARSE * long
        in_middle = cells[coarse] + buckets((starts + ends)[coarse] // 2)
        self._time += np.bincount(in_middle, long[coarse], size).reshape(self._time.shape)
        cells, starts, ends = cells[~coarse], starts[~coarse], ends[~coarse]
        first, last = buckets(starts), buckets(ends)
        at_first, at_last = cells + first, cells + last
        ends_of = np.bincount(at_last, ends - EDGES[last], size) - np.bincount(at_first, starts - EDGES[first], size)
        passed = np.bincount(at_first, minlength=size) - np.bincount(at_last, minlength=size)  # edges after buckets
        self._time += ends_of.reshape(-1, BUCKETS) + passed.reshape(-1, BUCKETS).cumsum(axis=1) * WIDTHS

    def renew(self) -> None:
        """Compute the index from what was noted, and let all counts decay."""
        if self._spans:
            self.watched_all(*view(self._spans).reshape(-1, 3).T)
            self._spans = array("q")
        groups, classes = self._rates()
        known = self._time.any(axis=1)  # the others have their group's rates
        found = _index(np.concatenate((groups, classes[known])))
        self.index = np.repeat(found[: len(groups)], self._group, axis=0)
        self.index[known] = found[len(groups) :]
        self.index_of = self.index.ravel().data  # of class * BUCKETS + bucket
        self._reuses *= self._decay
        self._time *= self._decay

    def _rates(self) -> tuple[Column, Column]:
        """Return the rates of groups and of classes."""
        grouped = (-1, self._group, BUCKETS)
        reuses, time = (of.reshape(grouped).sum(1) for of in (self._reuses, self._time))
        of_groups, of_classes = self._trust
        groups = (reuses + of_groups) / (time + of_groups / self._prior)
        classes = (self._reuses + of_classes) / (self._time + of_classes / np.repeat(groups, self._group, axis=0))
        return groups, classes


def _index(rates: Column) -> Column:
    expected = np.minimum(rates * WIDTHS, MOST_REUSES)
    survival = np.exp(-np.cumsum(np.pad(expected, ((0, 0), (1, 0))), axis=1))  # at each edge
    time = survival[:, :-1] * -np.expm1(-expected) / np.maximum(expected / WIDTHS, 1e-300)
    to_come = np.cumsum(np.pad(time, ((0, 0), (0, 1)))[:, ::-1], axis=1)[:, ::-1]  # time in memory beyond each edge
    survival, to_come = np.ascontiguousarray(survival.T), np.ascontiguousarray(to_come.T)
    rate = survival[FROM] - survival[UNTIL + 1]  # reuses between two edges
    rate /= to_come[FROM] - to_come[UNTIL + 1]
    index: Column = np.maximum.reduceat(rate, FIRST).T
    return index

"""Classes of checkpoints by branches below, uses and depth; their rates of reuse by age, learned from traffic.

An age is the time since the last use, in logical ticks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from headwater.cache.eviction.base.rows import Column, Key, Numbers, Rows, view
from headwater.cache.node import Node

BUCKETS = 40  # of age: 1, 1.5, 2, 3, 4, 6 and so on; the last one has no end
EDGES = np.array([0.0, *(2.0 ** (b // 2) * (1 + b % 2 / 2) for b in range(1, BUCKETS)), np.inf])
WIDTHS = np.diff(np.append(EDGES[:-1], 2 * EDGES[-2]))
MIDDLES = np.maximum(1.0, EDGES[:-1] + WIDTHS / 2)
COARSE_FRACTION = 8  # a span shorter than 1/8 of its age counts in one bucket
MAX_REUSES_A_BUCKET = 15.0  # that are expected
MAX_WAITING_SPANS = 4096  # that are not counted yet
TRUST, TRUST_IN_GROUP = 0.5, 16.0  # reuses by which the prior counts, and a group's rate

MAX_USES = 255  # that are counted
BRANCH_CLASSES, DEPTH_CLASSES = 3, 7  # no branch, 1, more; below 256 tokens, 1,024 and so on
# 1 + uses that the prior assumes, by class: none, another's work, 1, 2-3, 4-7, more; none at a learned position
PRIOR_USES = np.array([1, 2, 2, 3, 3, 3, 4])
PRIOR_USES_OF_TAILS = [1, 2]  # not used, used
LEARNED_CLASS = (len(PRIOR_USES) - 1) * DEPTH_CLASSES
CLASSES_A_BRANCH = len(PRIOR_USES) * DEPTH_CLASSES
CLASS_OF_USES = [
    DEPTH_CLASSES * (uses if uses < 2 else min(len(PRIOR_USES) - 2, 1 + (uses - 1).bit_length()))
    for uses in range(MAX_USES + 1)
]
CLASS_OF_DEPTH_BITS = [min(DEPTH_CLASSES - 1, max(0, bits - 1) // 2) for bits in range(64)]  # depth in 64 tokens

# Bits of a mark: all but times and depth on which class and worth of a node's checkpoint depend
BRANCHES_MARK, PARENT, EXISTS, HELD, SPECULATIVE, LEAF = 0xE0, 16, 8, 4, 2, 1


def class_of(node: Node, uses: int, unit_tokens: int) -> int:
    """Return the class of a node's checkpoint."""
    live = node.live
    of_branches = CLASSES_A_BRANCH * ((live if live < BRANCH_CLASSES else BRANCH_CLASSES) - 1)
    of_uses = LEARNED_CLASS if node.learned and not uses else CLASS_OF_USES[uses]
    return of_branches + of_uses + CLASS_OF_DEPTH_BITS[(node.end * unit_tokens >> 6).bit_length()]


def class_of_leaf(position: int, uses: int) -> int:
    """Return the class of a checkpoint without branches at a position in tokens."""
    return CLASS_OF_USES[uses] + CLASS_OF_DEPTH_BITS[(position >> 6).bit_length()]


def class_of_tail(position: int, uses: int) -> int:
    """Return the class of a tail after a position in tokens: whether it was used, and depth."""
    return BRANCH_CLASSES * CLASSES_A_BRANCH + class_of_leaf(position, min(uses, 1))


def class_of_ghost(kind: int, uses: int, is_deepest: bool) -> int:
    """Return the class of a used ghost entry that was of class `kind`.

    If no checkpoint of the prompt had been evicted, one above the deepest would have a branch below it.
    """
    branches, rest = divmod(kind, CLASSES_A_BRANCH)
    if not is_deepest:
        branches = max(1, branches)
    return branches * CLASSES_A_BRANCH + CLASS_OF_USES[uses] + rest % DEPTH_CLASSES


def used(uses: int, is_request: bool) -> int:
    """Return the number of uses after one more: 0 none, 1 other work than requests', else 1 more than requests."""
    return min(MAX_USES, max(2, uses + 1)) if is_request else max(1, uses)


def mark_of(node: Node) -> int:
    """Return the mark of a node with a checkpoint, 1 to 255. It has the lowest bits of the number of branches."""
    mark = (node.live & 7) << 5 | EXISTS
    if node.children:
        mark |= PARENT
    elif not node.pins and node.parent is not None:
        mark |= LEAF
    if node.holds:
        mark |= HELD
    if node.speculative:
        mark |= SPECULATIVE
    return mark


def bucket(age: int) -> int:
    """Return the bucket of an age; ages below 1 count as 1."""
    if age < 2:
        return 0
    top = age.bit_length() - 1
    return 2 * top + (age >> (top - 1) & 1) if top < BUCKETS // 2 else BUCKETS - 1


def buckets(ages: Column) -> Column:
    """Return the bucket of each age."""
    found: Column = (np.maximum(ages.astype(np.float32), 1).view(np.int32) >> 22) - (127 << 1)  # exponent and half
    return np.minimum(found, BUCKETS - 1, out=found)


class ReuseRates:
    """Reuses and time watched of each class in each bucket of age, and the index that follows from them.

    The rate of a cell is (reuses + n) / (time + n / expected): n reuses at the expected rate are added to those that
    were seen. The expected rate of a class is that of its group, with n = TRUST_IN_GROUP; that of a group is the
    prior, with n = TRUST. Counts decay at each `renew`, so that the rates follow a change of traffic.

    The index of a class at an age is the highest rate of reuse per time in memory, over all ages until which a
    checkpoint could be kept (Gittins 1979). With survival G and the expected time in memory C until an age, the rate
    between two ages is the slope of G over C.
    """

    def __init__(self, prior: Column, group: int, decay: float = 0.97) -> None:
        """prior: reuses a tick, of each group (rows) in each bucket. group: number of classes in each."""
        self._prior, self._group, self._decay = prior, group, decay
        self.reuses, self.time = (np.zeros((len(prior) * group, BUCKETS)) for _ in range(2))
        self._reuses_of: Any = self.reuses.ravel().data  # of class * BUCKETS + bucket
        self._spans = array("q")  # class, start and end, one span after the other
        self.renew()

    def at(self, kind: int, age: int) -> float:
        """Return the index of reuse of a class at an age."""
        return self.index_of[kind * BUCKETS + bucket(age)]

    def reused(self, kind: int, age: int, share: float = 1.0) -> None:
        """Note that one of a class was used at an age, or a share of it."""
        self._reuses_of[kind * BUCKETS + bucket(age)] += share

    def watched(self, kind: int, start: int, end: int) -> None:
        """Note that one was of a class between two ages."""
        self._spans.extend((kind, start, end))
        if len(self._spans) >= 3 * MAX_WAITING_SPANS:
            self._count_spans()

    def _count_spans(self) -> None:
        if self._spans:
            self.watched_all(*view(self._spans).reshape(-1, 3).T)
            self._spans = array("q")

    def watched_all(self, kinds: Column, starts: Column, ends: Column) -> None:
        """Note spans of many, as `watched` does of one."""
        size, long, cells = self.time.size, ends - starts, kinds.astype(np.int64) * BUCKETS
        is_coarse = starts >= COARSE_FRACTION * long
        coarse, fine = is_coarse.nonzero()[0], (~is_coarse).nonzero()[0]  # numbers of rows: faster than a mask
        in_middle = cells[coarse] + buckets((starts[coarse] + ends[coarse]) >> 1)
        self.time += np.bincount(in_middle, long[coarse], size).reshape(self.time.shape)
        cells, starts, ends = cells[fine], starts[fine], ends[fine]
        first, last = buckets(starts), buckets(ends)
        at_first, at_last = cells + first, cells + last
        ends_of = np.bincount(at_last, ends - EDGES[last], size) - np.bincount(at_first, starts - EDGES[first], size)
        passed = np.bincount(at_first, minlength=size) - np.bincount(at_last, minlength=size)  # edges after buckets
        self.time += ends_of.reshape(-1, BUCKETS) + passed.reshape(-1, BUCKETS).cumsum(axis=1) * WIDTHS

    def renew(self) -> None:
        """Compute the index from the counts, and let all counts decay."""
        self._count_spans()
        groups, classes = self.rates()
        known = self.time.any(axis=1)  # the others have their group's rates
        found = _index(np.concatenate((groups, classes[known])))
        self.index = np.repeat(found[: len(groups)], self._group, axis=0)
        self.index[known] = found[len(groups) :]
        self.index_of = self.index.ravel().data  # of class * BUCKETS + bucket
        self.reuses *= self._decay
        self.time *= self._decay

    def rates(self) -> tuple[Column, Column]:
        """Return the rates of groups and of classes."""
        grouped = (-1, self._group, BUCKETS)
        reuses, time = (of.reshape(grouped).sum(1) for of in (self.reuses, self.time))
        groups = (reuses + TRUST) / (time + TRUST / self._prior)
        of_classes = self.time + TRUST_IN_GROUP / np.repeat(groups, self._group, axis=0)
        classes = (self.reuses + TRUST_IN_GROUP) / of_classes
        return groups, classes


def _index(rates: Column) -> Column:
    expected = np.minimum(rates * WIDTHS, MAX_REUSES_A_BUCKET)
    survival = np.exp(-np.cumsum(np.pad(expected, ((0, 0), (1, 0))), axis=1))  # at each edge
    time = survival[:, :-1] * -np.expm1(-expected) / np.maximum(expected / WIDTHS, 1e-300)
    to_come = np.cumsum(np.pad(time, ((0, 0), (0, 1)))[:, ::-1], axis=1)[:, ::-1]  # time in memory beyond each edge
    survival, to_come = np.ascontiguousarray(survival.T), np.ascontiguousarray(to_come.T)
    index = np.zeros((BUCKETS, len(rates)))
    for width in range(1, BUCKETS + 1):  # in buckets, of the ages until which a checkpoint could be kept
        slopes = (survival[:-width] - survival[width:]) / (to_come[:-width] - to_come[width:])
        np.maximum(index[: len(slopes)], slopes, out=index[: len(slopes)])
    return np.ascontiguousarray(index.T)


class Aging(Rows[Key]):
    """Rows of checkpoints: each use, and the time until then, is counted for the class of the row."""

    kind: Numbers  # class
    uses: Numbers  # see `used`
    time: Numbers  # of the last use
    watched: Numbers  # age until which its time is counted

    def __init__(self, rates: ReuseRates, **columns: str) -> None:
        super().__init__(kind="h", uses="B", time="q", watched="q", **columns)
        self._rates = rates

    def use(self, row: int, kind: int, uses: int, now: int, counts: bool = True) -> None:
        """Note that work resumed there, with uses and class from now on. counts: the work was a request's."""
        self.end_span(row, now)
        if counts:
            self._rates.reused(self.kind[row], now - self.time[row])
        self.kind[row], self.uses[row], self.time[row], self.watched[row] = kind, uses, now, 0

    def change(self, row: int, kind: int, now: int) -> None:
        """Set the class from now on."""
        self.end_span(row, now)
        self.kind[row], self.watched[row] = kind, max(0, now - self.time[row])

    def watch(self, rows: slice, now: int) -> None:
        """Count the time of these rows until now."""
        watched = view(self.watched)[rows]
        ages = np.maximum(now - view(self.time)[rows], watched)
        self._rates.watched_all(view(self.kind)[rows], watched, ages)
        watched[:] = ages

    def watch_all(self, now: int) -> Iterator[int]:
        """Count the time of all rows, in slices; yield the number of rows of each."""
        for rows in self.slices():
            self.watch(rows, now)
            yield rows.stop - rows.start

    def end_span(self, row: int, now: int) -> None:
        """Count the time of a row until now, which the caller notes in `watched`, unless the row is removed."""
        age, watched = now - self.time[row], self.watched[row]
        if age > watched:
            self._rates.watched(self.kind[row], watched, age)

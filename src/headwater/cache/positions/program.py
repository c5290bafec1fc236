"""The best places for k checkpoints under a known law of overlap depths: the exact dynamic program.

Sparse prefix caching, theorem 2. With depths x_1 < x_2 < ... of probability p, P and Q the prefix sums of p and x·p,
and the last of k checkpoints at x_j, serving the first n depths costs

    V_k(n) = Q(n) + min over j of [V_{k−1}(j−1) − Q(j−1) + x_j·P(j−1)] − x_j·P(n).

The bracket is a number b_j, so each layer is the lower envelope of the lines b_j − x_j·t at ascending t = P(n), and the
lines on it are the corners of the lower hull of the points (x_j, b_j). A checkpoint at j > n costs at least
V_{k−1}(n): it need not be ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.cache.positions.hull import Column, lower_hull
from headwater.cache.positions.recomputation import Numbers, recomputation

DENSE = 160  # up to so many depths, comparing all pairs at once is faster than finding a hull


@dataclass(frozen=True, slots=True)
class Schedule:
    positions: tuple[int, ...]  # tokens, ascending multiples of the page
    cost: float  # tokens that a request recomputes on average


def solve(depths: Numbers, weights: Numbers, k: int, page: int = 1) -> Schedule:
    """At most k positions on the page grid with the least expected recomputation, in O(k) passes over the depths.

    depths: tokens that requests overlap, in any order; weights: how likely each is, in any unit, not negative.
    Only positions at which some overlap ends (floored to the grid) are needed, and only such are given: moving a
    checkpoint on to the next one costs nothing. Of equal ones the same is chosen each time.
    """
    if k < 0:
        raise ValueError(f"{k} checkpoints cannot be placed; 0 is the least")
    pages, mass = _on_grid(depths, weights, page)
    if k < len(pages):
        pages = pages[_chosen(pages, mass, k)]
    positions = tuple((pages.astype(np.int64) * page).tolist())
    return Schedule(positions, recomputation(positions, depths, weights).cost)


def _on_grid(depths: Numbers, weights: Numbers, page: int) -> tuple[Column, Column]:
    """Page numbers at which overlaps end, and their weights. Those within the first page no checkpoint can serve."""
    mass = np.bincount(np.asarray(depths, dtype=np.int64) // page, weights=np.asarray(weights, dtype=float))
    mass[:1] = 0
    pages = np.flatnonzero(mass)
    return pages.astype(float), mass[pages]


def _chosen(x: Column, p: Column, k: int) -> list[int]:
    """Indices into x of k < len(x) checkpoints, ascending."""
    below = np.concatenate(([0.0], np.cumsum(p)))
    moment = np.concatenate(([0.0], np.cumsum(x * p)))
    lines = _AllPairs(x, below) if len(x) <= DENSE else _Envelope(x, below)
    bare = x * below[:-1] - moment[:-1]
    cost, last = moment, []
    for _ in range(k):
        offset = bare + cost[:-1]
        best = lines.lowest(offset)
        last.append(best)
        cost = moment + offset[best] - x[best] * below
    chosen, n = [], len(x)
    for best in reversed(last):
        if n:
            n = min(int(best[n]), n - 1)
            chosen.append(n)
    return chosen[::-1]


class _AllPairs:
    """Lines with slopes −x, each compared at each place."""

    def __init__(self, x: Column, places: Column) -> None:
        self._heights = np.outer(places, -x)

    def lowest(self, offset: Column) -> Column:
        """The lowest line at each place, the first of equals."""
        best: Column = (self._heights + offset).argmin(axis=1)
        return best


class _Envelope:
    """The same by the hull of the lines' offsets; places ascend. Each hull is the guess for the next."""

    def __init__(self, x: Column, places: Column) -> None:
        self._x, self._places = x, places
        self._hull: Column | None = None

    def lowest(self, offset: Column) -> Column:
        """The lowest line at each place, the first of equals."""
        hull, turns = lower_hull(self._x, offset, self._hull)  # beyond each turn the next line of the hull is lower
        passed = np.ceil(np.interp(self._places, turns, np.arange(len(turns)), right=len(turns))).astype(np.intp)
        passed += np.append(turns, np.inf)[passed] < self._places  # interp may have rounded a turn just passed away
        self._hull = hull
        best: Column = hull[passed]
        return best

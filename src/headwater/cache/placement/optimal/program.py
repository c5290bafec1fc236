"""Optimal positions of k checkpoints under a known overlap distribution: the exact dynamic program.

Sparse prefix caching, theorem 2. With depths x_1 < x_2 < ... of probability p, P and Q the prefix sums of p and x·p,
and the last of k checkpoints at x_j, serving the first n depths costs

    V_k(n) = Q(n) + min over j of [V_{k−1}(j−1) − Q(j−1) + x_j·P(j−1)] − x_j·P(n).

The bracket is a number b_j, so each layer is the lower envelope of the lines b_j − x_j·t at ascending t = P(n), and the
lines on it are the corners of the lower hull of the points (x_j, b_j). A checkpoint at j > n costs at least
V_{k−1}(n): it need not be ruled out.

The savings of a set of checkpoints are those of the paper's section 3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]
Numbers = Sequence[int] | Sequence[float] | Column

MAX_DENSE_DEPTHS = 160  # up to this number, comparing all pairs at once is faster than finding a hull

# the search for a hull
MAX_BRIDGED_DENTS = 32  # bridged one by one; more dents are flattened together, a point each
WINDOW_POINTS = 64  # on each side of a dent in the first search for its bridge
MAX_TANGENT_TURNS = 32  # a bridge that rounding hides until then is left to the next round
CHORD_SLACK = 1e-13  # of the greatest y: distance above a chord from which a point is certainly above it


@dataclass(frozen=True, slots=True)
class Schedule:
    positions: tuple[int, ...]  # tokens, ascending multiples of the page
    cost: float  # tokens that a request recomputes on average


def solve(depths: Numbers, weights: Numbers, k: int, page: int = 1) -> Schedule:
    """Return at most k positions on the page grid with the least expected recomputation, in O(k) passes.

    depths: tokens that requests overlap, in any order; weights: how likely each is, in any unit, not negative.
    Only positions at which some overlap ends (floored to the grid) are returned: moving a checkpoint on to the next
    such position costs nothing. Ties are always resolved in the same way.
    """
    if k < 0:
        raise ValueError(f"{k} checkpoints cannot be placed; at least 0 can")
    pages, mass = _on_grid(depths, weights, page)
    if k < len(pages):
        pages = pages[_chosen(pages, mass, k)]
    positions = tuple((pages.astype(np.int64) * page).tolist())
    return Schedule(positions, recomputation(positions, depths, weights).cost)


def _on_grid(depths: Numbers, weights: Numbers, page: int) -> tuple[Column, Column]:
    """Return the pages at which overlaps end, and their weights; without the first page, which no checkpoint serves."""
    mass = np.bincount(np.asarray(depths, dtype=np.int64) // page, weights=np.asarray(weights, dtype=float))
    mass[:1] = 0
    pages = np.flatnonzero(mass)
    return pages.astype(float), mass[pages]


def _chosen(x: Column, p: Column, k: int) -> list[int]:
    """Return the indices into x of k < len(x) checkpoints, ascending."""
    below = np.concatenate(([0.0], np.cumsum(p)))
    moment = np.concatenate(([0.0], np.cumsum(x * p)))
    lines = Lines.of(x, below)
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


class Lines(ABC):
    """Lines b − x·t: their slopes −x fall strictly, and the places t at which they are compared ascend."""

    @staticmethod
    def of(x: Column, places: Column) -> Lines:
        """Return the faster method for the number of lines."""
        return _AllPairs(x, places) if len(x) <= MAX_DENSE_DEPTHS else _Envelope(x, places)

    @abstractmethod
    def lowest(self, offset: Column) -> Column:
        """Return the index of the lowest line at each place, of equals the first. offset: b of each, not negative."""


class _AllPairs(Lines):
    """Lines with slopes −x, all compared at all places."""

    def __init__(self, x: Column, places: Column) -> None:
        self._heights = np.outer(places, -x)

    def lowest(self, offset: Column) -> Column:
        best: Column = (self._heights + offset).argmin(axis=1)
        return best


class _Envelope(Lines):
    """Lines with slopes −x, compared by the hull of their offsets; places ascend. A hull is the guess for the next."""

    def __init__(self, x: Column, places: Column) -> None:
        self._x, self._places = x, places
        self._hull: Column | None = None

    def lowest(self, offset: Column) -> Column:
        hull, turns = lower_hull(self._x, offset, self._hull)  # beyond each turn the next line of the hull is lower
        passed = np.ceil(np.interp(self._places, turns, np.arange(len(turns)), right=len(turns))).astype(np.intp)
        passed += np.append(turns, np.inf)[passed] < self._places  # interp may have rounded a turn just passed away
        self._hull = hull
        best: Column = hull[passed]
        return best


def lower_hull(x: Column, y: Column, guess: Column | None = None) -> tuple[Column, Column]:
    """Return the indices of the corners of the lower hull of (x, y), and the slopes between them. Both ascend strictly.

    x ascends strictly; y is not negative. A point on or above the chord of two others is not a corner. So every such
    point between its neighbours is removed, in rounds, until none is left. guess: indices of probable corners (those of
    a similar curve), the first and last index among them: good ones save rounds.
    """
    kept, at, height = np.arange(len(x)), x, y
    if guess is not None and len(guess) < len(x):
        kept = _below(x, y, guess)
        at, height = x[kept], y[kept]
    while True:
        slope = (height[1:] - height[:-1]) / (at[1:] - at[:-1])
        dents = np.flatnonzero(slope[:-1] >= slope[1:]) + 1
        if not len(dents):
            return kept, slope
        stays = np.ones(len(kept), dtype=bool)
        stays[dents] = False
        if len(dents) <= MAX_BRIDGED_DENTS < WINDOW_POINTS < len(kept):
            right = 0
            for dent in dents.tolist():
                if dent >= right:
                    left, right = _bridge(at, height, dent)
                    stays[left + 1 : right] = False
        kept, at, height = kept[stays], at[stays], height[stays]


def _below(x: Column, y: Column, guess: Column) -> Column:
    """Return the points of `guess`, and those that are not clearly above the line through them."""
    line = np.interp(x, x[guess], y[guess])
    line += CHORD_SLACK * y.max()
    stays = y <= line
    stays[guess] = True
    return np.flatnonzero(stays)


def _bridge(x: Column, y: Column, dent: int) -> tuple[int, int]:
    """Return two points, left and right of the dent, between which all points are on or above their chord.

    The common tangent from below of all points in a window touches these two. The window is widened while the tangent
    touches its rim.
    """
    width = WINDOW_POINTS
    while True:
        first, last = max(0, dent - width), min(len(x), dent + width + 1) - 1
        touching = _tangent(x, y, (first, dent, last))
        if touching is None:
            return dent - 1, dent + 1
        left, right = touching
        if (left > first or not first) and (right < last or last == len(x) - 1):
            return left, right
        width *= 4


def _tangent(x: Column, y: Column, window: tuple[int, int, int]) -> tuple[int, int] | None:
    """Return the points before and after the middle that the lower tangent touches; None if rounding hides it."""
    first, middle, last = window
    before, after = slice(first, middle), slice(middle + 1, last + 1)
    left = middle - 1
    for _ in range(MAX_TANGENT_TURNS):
        right = middle + 1 + int(((y[after] - y[left]) / (x[after] - x[left])).argmin())
        further = first + int(((y[right] - y[before]) / (x[right] - x[before])).argmax())
        if further == left:
            return left, right
        left = further
    return None


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Expected recomputation: tokens that a request recomputes on average."""

    cost: float  # from the deepest checkpoint at or before where its overlap ends
    baseline: float  # from the beginning: E[r]

    @property
    def savings(self) -> float:
        """Normalised savings 1 − E[cost] / E[r]; 0 if there is nothing to save."""
        return 1 - self.cost / self.baseline if self.baseline else 0.0

    @property
    def reduction(self) -> float:
        """Reduction factor E[r] / E[cost]; infinite if nothing is recomputed, 1 if there is nothing to save."""
        if not self.baseline:
            return 1.0
        return self.baseline / self.cost if self.cost else math.inf


def recomputation(positions: Sequence[int], depths: Numbers, weights: Numbers | None = None) -> Recomputation:
    """Return the recomputation for requests with overlaps of `depths` tokens, weighted by count or probability."""
    at = np.asarray(depths, dtype=float)
    weight = np.ones(len(at)) if weights is None else np.asarray(weights, dtype=float)
    total = float(weight.sum())
    if not total:
        return Recomputation(0.0, 0.0)
    stops = np.array([0, *sorted(positions)], dtype=float)
    resumed = stops[np.searchsorted(stops, at, "right") - 1]
    return Recomputation(float(weight @ (at - resumed)) / total, float(weight @ at) / total)

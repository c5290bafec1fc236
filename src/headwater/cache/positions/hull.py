"""Lower hull of points in the plane, computed on whole columns at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]

FEW = 32  # up to this many dents are bridged one by one; more are flattened together, a point each
WINDOW = 64  # points on each side of a dent in the first search for its bridge
TURNS = 32  # iterations; a bridge that rounding hides until then is left to the next round
SLACK = 1e-13  # of the greatest y: distance above a chord from which a point is certainly above it


def lower_hull(x: Column, y: Column, guess: Column | None = None) -> tuple[Column, Column]:
    """Return the indices of the corners of the lower hull of (x, y), and the slopes between them. Both ascend strictly.

    x ascends strictly; y is not negative. A point on or above the chord of two others is no corner. So every such point
    between its neighbours is removed, in rounds, until none is left. guess: indices of probable corners (those of a
    similar curve), the first and last index among them: good ones save rounds.
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
        if len(dents) <= FEW < WINDOW < len(kept):
            right = 0
            for dent in dents.tolist():
                if dent >= right:
                    left, right = _bridge(at, height, dent)
                    stays[left + 1 : right] = False
        kept, at, height = kept[stays], at[stays], height[stays]


def _below(x: Column, y: Column, guess: Column) -> Column:
    """Return the points of `guess`, and those that are not clearly above the line through them."""
    line = np.interp(x, x[guess], y[guess])
    line += SLACK * y.max()
    stays = y <= line
    stays[guess] = True
    return np.flatnonzero(stays)


def _bridge(x: Column, y: Column, dent: int) -> tuple[int, int]:
    """Return two points, left and right of the dent, between which all points are on or above their chord.

    The common tangent from below of all points in a window touches these two. The window is widened while the tangent
    touches its rim.
    """
    width = WINDOW
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
    for _ in range(TURNS):
        right = middle + 1 + int(((y[after] - y[left]) / (x[after] - x[left])).argmin())
        further = first + int(((y[right] - y[before]) / (x[right] - x[before])).argmax())
        if further == left:
            return left, right
        left = further
    return None

"""The lower hull of points in the plane, found with whole columns at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

Column = np.ndarray[Any, np.dtype[Any]]

FEW = 32  # so few dents are bridged one by one; more are flattened together, a point each
WINDOW = 64  # points on each side of a dent among which its bridge is sought first
TURNS = 32  # a bridge that is not found by then, because of rounding, is left to the next round
SLACK = 1e-13  # of the greatest y: how far above a chord a point has to be to be beyond doubt


def lower_hull(x: Column, y: Column, guess: Column | None = None) -> tuple[Column, Column]:
    """Indices of the corners of the lower hull of (x, y), and the slopes between them; both ascend strictly.

    x ascends strictly; y is not negative. A point on or above the chord of two others is no corner. So every point
    that lies so between its neighbours goes, in rounds, until none does. guess: indices, first and last among them, of
    what may be the corners (those of a similar curve): the better they are the fewer rounds it takes.
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
    """The points of `guess`, and those that are not clearly above the line through them."""
    line = np.interp(x, x[guess], y[guess])
    line += SLACK * y.max()
    stays = y <= line
    stays[guess] = True
    return np.flatnonzero(stays)


def _bridge(x: Column, y: Column, dent: int) -> tuple[int, int]:
    """Two points, left and right of the dent, between which all points are on or above their chord.

    They are the touching points of the common tangent from below of all that is in a window, which is widened as long
    as the tangent touches its rim.
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

"""The lower hull by columns against the chain that is built point by point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.placement.optimal.program import MAX_BRIDGED_DENTS, WINDOW_POINTS, lower_hull


def chain(x: list[int], y: list[int]) -> list[int]:
    """Indices of the corners, by Andrew's monotone chain, in whole numbers."""
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(i)
    return corners


@given(
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    data=st.data(),
)
def test_hull_corners_do_not_depend_on_the_guess(steps: list[int], data: st.DataObject) -> None:
    x = np.cumsum(steps)
    y = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(x), max_size=len(x))))
    guess = np.array(sorted({0, len(x) - 1, *data.draw(st.sets(st.integers(0, len(x) - 1)))}))
    corners, slopes = lower_hull(x.astype(float), y.astype(float))
    assert corners.tolist() == chain(x.tolist(), y.tolist())
    assert slopes.tolist() == (np.diff(y[corners]) / np.diff(x[corners])).tolist()
    assert lower_hull(x.astype(float), y.astype(float), guess)[0].tolist() == corners.tolist()


@pytest.mark.parametrize("bumps", [1, 3, MAX_BRIDGED_DENTS, MAX_BRIDGED_DENTS + 9])
def test_wide_dents_of_smooth_curves_are_bridged(bumps: int) -> None:
    x = np.arange(6000)
    y = np.round(1e6 * (np.sin(x / 6000 * 2 * np.pi * bumps) + 2) + (x - 3000) ** 2 / 20).astype(int)
    corners, _ = lower_hull(x.astype(float), y.astype(float))
    assert corners.tolist() == chain(x.tolist(), y.tolist())
    assert max(np.diff(corners)) > WINDOW_POINTS


def test_dent_in_a_long_convex_curve_takes_few_rounds() -> None:
    x = np.arange(-5000, 5001)
    y = np.abs(x) ** 2 + np.where(x == 0, 10**6, 0)
    deep = np.where(np.abs(x) == 4000, -(10**7), 0) + y + 10**8
    for heights in (y, deep):
        assert lower_hull(x.astype(float), heights.astype(float))[0].tolist() == chain(x.tolist(), heights.tolist())

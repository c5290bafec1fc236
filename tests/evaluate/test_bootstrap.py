"""Intervals: where they are known, and where there are none."""

from __future__ import annotations

import random

import pytest

from headwater.evaluate.summary import Estimate, estimate


def test_equal_values_have_an_interval_without_width():
    assert estimate([1.0] * 6, [0, 0, 1, 1, 2, 2]) == Estimate(1.0, 1.0, 1.0)


def test_one_group_has_no_interval():
    assert estimate([0.0, 1.0], [7, 7]) == Estimate(0.5, None, None)


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="0 values"):
        estimate([], [])


def test_an_equal_seed_gives_an_equal_interval():
    values, groups = [0.0, 1.0, 1.0, 0.0, 1.0], [0, 1, 2, 3, 4]
    assert estimate(values, groups, seed=3) == estimate(values, groups, seed=3)


def test_interval_of_two_groups_spans_both():
    # with half of all draws each, a quarter of the resamples is all of one group
    assert estimate([0.0, 1.0], [0, 1]) == Estimate(0.5, 0.0, 1.0)


def test_items_count_equally_in_groups_of_any_size():
    assert estimate([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]).mean == 0.75


def test_interval_of_independent_items_is_near_the_binomial_one():
    values = [1.0] * 80 + [0.0] * 320
    found = estimate(values, list(range(400)))
    assert found.low == pytest.approx(0.2 - 1.96 * 0.02, abs=0.005)  # the standard error is sqrt(0.2 * 0.8 / 400)
    assert found.high == pytest.approx(0.2 + 1.96 * 0.02, abs=0.005)


def test_copies_within_a_group_make_it_no_narrower():
    drawn = random.Random(0)
    values = [float(drawn.random() < 0.5) for _ in range(50)]
    once = estimate(values, list(range(50)))
    copied = estimate([v for v in values for _ in range(10)], [g for g in range(50) for _ in range(10)])
    assert (copied.mean, copied.low, copied.high) == pytest.approx((once.mean, once.low, once.high))

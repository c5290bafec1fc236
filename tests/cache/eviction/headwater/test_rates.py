"""Rates of reuse that are learned, and the index, held to sums and searches that are written out."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.cache.eviction.base.rows import view
from headwater.cache.eviction.headwater.rates import BUCKETS, EDGES, MIDDLES, WIDTHS, ReuseRates, bucket, buckets

PRIOR = np.tile(1 / (2 * MIDDLES), (2, 1))  # two groups
GROUP = 3


def rates(**options: float) -> ReuseRates:
    return ReuseRates(PRIOR, GROUP, **options)


def test_a_bucket_is_the_same_for_one_age_and_for_a_column() -> None:
    ages = np.array([*range(3000), 2**20, 2**20 + 1, 2**30])
    assert buckets(ages).tolist() == [bucket(int(age)) for age in ages]
    for age in (1, 2, 3, 5, 100, 5000):
        assert EDGES[bucket(age)] <= age < EDGES[bucket(age) + 1]


def test_time_watched_is_all_counted_in_the_buckets_that_it_passed() -> None:
    learned = rates(decay=1.0)
    learned.watched(1, 0, 7)
    learned.watched(1, 5, 5)
    learned.renew()
    assert learned.time[1].sum() == 7
    assert learned.time[1, :6].tolist() == [1.5, 0.5, 1, 1, 2, 1]  # ages 0-1.5, 1.5-2, 2-3, 3-4, 4-6 and 6-7 of 6-8


def test_a_short_span_at_a_great_age_counts_in_one_bucket() -> None:
    learned = rates(decay=1.0)
    kinds, starts, ends = np.array([4, 4]), np.array([1000, 2]), np.array([1100, 6])
    learned.watched_all(kinds, starts, ends)
    assert learned.time[4, bucket(1050)] == 100
    assert learned.time.sum() == 104


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_the_best_rate_of_reuse_until_any_later_age(seed: int) -> None:
    learned, rng = rates(), np.random.default_rng(seed)
    for _ in range(200):
        kind, age = int(rng.integers(6)), int(rng.integers(1, 5000))
        learned.watched(kind, 0, age)
        if rng.random() < 0.5:
            learned.reused(kind, age)
    learned.watched_all(*view(learned._spans).reshape(-1, 3).T)
    del learned._spans[:]
    rate = learned.rates()[1]
    learned.renew()
    for kind in range(6):
        for start in range(BUCKETS):
            survival, reused, spent, best = 1.0, 0.0, 0.0, 0.0
            for b in range(start, BUCKETS):
                expected = min(rate[kind, b] * WIDTHS[b], 15.0)
                within = 1 - np.exp(-expected)
                reused += survival * within
                spent += survival * within / (expected / WIDTHS[b])
                survival *= 1 - within
                best = max(best, reused / spent)
            assert learned.index[kind, start] == pytest.approx(best, rel=1e-6)


def test_a_class_that_is_reused_late_is_worth_more_as_it_ages() -> None:
    learned = rates()
    before = learned.index[0]
    assert before[bucket(2)] > before[bucket(90)]
    for _ in range(200):
        learned.watched(0, 0, 100)
        learned.reused(0, 100)
    learned.renew()
    after = learned.index[0]
    assert after[bucket(90)] > 2 * after[bucket(2)]


def test_index_without_counts_is_that_of_group_or_prior() -> None:
    learned = rates()
    for _ in range(200):
        learned.watched(0, 0, 100)
        learned.reused(0, 100)
    learned.renew()
    groups, _ = learned.rates()
    assert np.array_equal(learned.index[1], learned.index[2])
    assert not np.array_equal(learned.index[1], rates().index[1])
    assert np.array_equal(learned.index[3:], rates().index[3:])
    assert np.array_equal(groups[1], PRIOR[1])


def test_counts_decay_so_that_a_change_of_traffic_is_followed() -> None:
    learned = rates(decay=0.9)
    for _ in range(200):
        learned.watched(0, 0, 100)
        learned.reused(0, 100)
    for _ in range(200):
        learned.renew()
    assert learned.index == pytest.approx(rates().index, rel=1e-3)

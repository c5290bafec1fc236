"""The statistics of `make tenant-timing`: they see a difference that is there, and none that is not."""

from __future__ import annotations

import numpy as np
import pytest

from stress.tenant_timing import SENT_BY_NOBODY, SENT_BY_OTHER, SENT_BY_SELF, ks_statistic, permutation_p, report


def drawn(shift: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(10 + shift, 1, 100)


def test_statistic_is_the_largest_distance_of_the_distributions():
    assert ks_statistic(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 0
    assert ks_statistic(np.array([1.0, 2]), np.array([3.0, 4])) == 1
    assert ks_statistic(np.array([1.0, 2, 3, 4]), np.array([2.5, 3.5])) == pytest.approx(0.5)


def test_permutation_test_separates_only_meaningful_labels():
    assert permutation_p(drawn(0, 1), drawn(0, 2), 500, 0) > 0.05
    assert permutation_p(drawn(0, 1), drawn(2, 2), 500, 0) == 1 / 501


def test_timing_check_fails_on_a_leak_or_without_any_signal(capsys):
    alike, unlike = list(drawn(0, 1)), list(drawn(-5, 3))
    good = {SENT_BY_OTHER: list(drawn(0, 2)), SENT_BY_NOBODY: alike, SENT_BY_SELF: unlike}
    assert report(good, 0) == 0
    assert report(good | {SENT_BY_OTHER: unlike}, 0) == 1
    assert report(good | {SENT_BY_SELF: list(drawn(0, 4))}, 0) == 1
    assert "KS" in capsys.readouterr().out

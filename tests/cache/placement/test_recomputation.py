"""Savings of checkpoints, compared with values computed by hand."""

from __future__ import annotations

import math

from headwater.cache.placement.optimal.program import Recomputation, recomputation


def test_request_recomputes_from_the_deepest_checkpoint_within_its_overlap() -> None:
    found = recomputation((64, 128), [10, 64, 100, 128, 300])
    assert found.cost == (10 + 0 + 36 + 0 + 172) / 5
    assert found.baseline == (10 + 64 + 100 + 128 + 300) / 5


def test_savings_and_reduction() -> None:
    found = recomputation([100], [100, 200], [3, 1])
    assert (found.cost, found.baseline) == (25.0, 125.0)
    assert (found.savings, found.reduction) == (0.8, 5.0)


def test_without_checkpoints_nothing_is_saved() -> None:
    assert recomputation((), [5, 9]) == Recomputation(7.0, 7.0)
    assert recomputation((), [5, 9]).savings == 0
    assert recomputation((), [5, 9]).reduction == 1


def test_recomputation_of_extreme_placements() -> None:
    assert recomputation((5, 9), [5, 9]).reduction == math.inf
    nothing = recomputation((5,), [])
    assert (nothing.cost, nothing.savings, nothing.reduction) == (0.0, 0.0, 1.0)

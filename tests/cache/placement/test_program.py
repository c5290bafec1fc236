"""The program of optimal positions, its hull, and the recomputation that it counts."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cache.placement.optimal import program
from headwater.cache.placement.optimal.program import (
    MAX_BRIDGED_DENTS,
    WINDOW_POINTS,
    Recomputation,
    lower_hull,
    recomputation,
    solve,
)
from tests.cache.placement.recurrence import by_hull_trick, by_recurrence, cost_of, over_all_sets
from tests.support import examples

laws = st.dictionaries(st.integers(1, 14), st.integers(0, 6), min_size=1, max_size=14)


@pytest.fixture(params=[0, 10_000], ids=["hull", "all pairs"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_DENSE_DEPTHS", request.param)


@pytest.mark.usefixtures("either_way")
@settings(max_examples=examples(150))
@given(law=laws, k=st.integers(0, 5), grid=st.integers(1, 4))
def test_no_set_of_k_positions_costs_less(law: dict[int, int], k: int, grid: int) -> None:
    total = max(1, sum(law.values()))
    schedule = solve(list(law), list(law.values()), k, grid)
    assert len(schedule.positions) <= k
    assert all(at > 0 and at % grid == 0 for at in schedule.positions)
    assert schedule.cost == cost_of(schedule.positions, law) / total == over_all_sets(law, k, grid) / total


@settings(max_examples=examples(60))
@given(law=laws.filter(lambda law: any(law.values())), k=st.integers(1, 6))
def test_the_hull_trick_gives_the_recurrence(law: dict[int, int], k: int) -> None:
    assert by_hull_trick(law, k) == by_recurrence(law, k) == over_all_sets(law, k)


def law_of(kind: str, n: int) -> dict[int, int]:
    """Whole-number weights of depths 1..n."""
    rng, depth = np.random.default_rng(7), np.arange(1, n + 1)
    bumps = sum(np.exp(-(((depth / n - at) / 0.05) ** 2)) for at in (0.2, 0.45, 0.9))
    weights = {
        "uniform": np.ones(n),
        "random": rng.integers(1, 100, n),
        "sparse": rng.integers(0, 100, n) * (rng.random(n) < 0.05),
        "smooth": np.round(1000 * bumps) + 1,
        "falling": np.round(1000 * 0.998**depth),
        "one heap": 1 + 5000 * (depth > n - 20),
    }[kind]
    return {int(at): int(weight) for at, weight in zip(depth, weights, strict=True)}


KINDS = ("uniform", "random", "sparse", "smooth", "falling", "one heap")


@pytest.mark.parametrize("kind", KINDS)
def test_program_of_2000_depths_equals_the_recurrence(kind: str) -> None:
    law = law_of(kind, 2000)
    positions = solve(list(law), list(law.values()), 32).positions
    assert cost_of(positions, law) == by_hull_trick(law, 32)


def test_program_of_300_depths_equals_the_plain_recurrence() -> None:
    for kind in ("random", "smooth"):
        law = law_of(kind, 300)
        assert cost_of(solve(list(law), list(law.values()), 6).positions, law) == by_recurrence(law, 6)


@pytest.mark.usefixtures("either_way")
def test_ties_are_resolved_independently_of_order() -> None:
    depths = list(range(1, 200))
    first = solve(depths, [1] * 199, 7)
    random.Random(1).shuffle(depths)
    assert solve(depths, [1] * 199, 7) == first
    assert solve([d for d in depths for _ in range(2)], [0.5] * 398, 7) == first


def test_costs_are_in_tokens_and_positions_on_the_page_grid() -> None:
    schedule = solve([100, 200, 300], [1, 1, 2], 1, page=64)
    assert schedule.positions == (192,)
    assert schedule.cost == (100 + 8 + 2 * 108) / 4


def test_no_more_positions_than_places_where_overlaps_end() -> None:
    assert solve([70, 100, 130, 10], [1, 1, 1, 1], 9, page=64).positions == (64, 128)
    assert solve([], [], 3).positions == ()
    assert solve([5, 9], [0, 1], 2).positions == (9,)


def test_a_negative_number_of_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 checkpoints cannot be placed"):
        solve([1], [1], -1)


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


@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=60), data=st.data())
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

"""The dynamic program against brute force and against the recurrence that it evaluates (theorem 2)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cache.placement.optimal import program
from headwater.cache.placement.optimal.program import solve
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

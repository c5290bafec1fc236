"""Theorems 1 to 4 and lemma 1 of sparse prefix caching, as properties of the shipped code."""

from __future__ import annotations

from itertools import combinations
from math import inf, log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cache.placement.balanced import balanced
from headwater.cache.placement.optimal.overlaps import Distribution
from headwater.cache.placement.optimal.program import recomputation, solve
from tests.support import examples

Law = np.ndarray[Any, np.dtype[np.float64]]

sizes = st.integers(1, 11).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def worst(positions: tuple[int, ...] | list[int], n: int) -> int:
    return max(depth - max([0, *(c for c in positions if c <= depth)]) for depth in range(1, n + 1))


def gaps(positions: tuple[int, ...] | list[int], n: int) -> list[int]:
    return [after - before for before, after in zip((0, *positions), (*positions, n + 1), strict=True)]


@settings(max_examples=examples(40))
@given(size=sizes)
def test_theorem_1_balanced_sets_are_best_under_uniform_overlap(size: tuple[int, int]) -> None:
    n, k = size
    q, s = divmod(n + 1, k + 1)
    total = (s * q * (q + 1) + (k + 1 - s) * q * (q - 1)) // 2
    depths = range(1, n + 1)
    assert round(recomputation(balanced(n, k), depths).cost * n) == total
    assert round(solve(depths, [1] * n, k).cost * n) == total
    for chosen in combinations(depths, k):
        even = max(gaps(chosen, n)) - min(gaps(chosen, n)) <= 1
        cost = round(recomputation(chosen, depths).cost * n)
        assert (cost == total) == even
        assert cost >= total


@settings(max_examples=examples(40))
@given(size=sizes)
def test_theorem_1_balanced_set_is_best_in_the_worst_case(size: tuple[int, int]) -> None:
    n, k = size
    least = min(worst(chosen, n) for chosen in combinations(range(1, n + 1), k))
    assert worst(balanced(n, k), n) == least == -(-(n + 1) // (k + 1)) - 1


@settings(max_examples=examples(30))
@given(n=st.integers(1, 3000), percent=st.integers(0, 100))
def test_theorem_1_holds_for_long_prefixes(n: int, percent: int) -> None:
    k = percent * n // 100
    q, s = divmod(n + 1, k + 1)
    exact = (s * q * (q + 1) + (k + 1 - s) * q * (q - 1)) / (2 * n)
    assert recomputation(balanced(n, k), range(1, n + 1)).cost == pytest.approx(exact, rel=1e-12, abs=1e-12)
    assert max(gaps(balanced(n, k), n)) - 1 == -(-(n + 1) // (k + 1)) - 1


def value(law: Law, k: int) -> float:
    return solve(np.arange(1, len(law) + 1), law, k).cost


def cost(positions: tuple[int, ...], law: Law) -> float:
    return recomputation(positions, np.arange(1, len(law) + 1), law).cost


def variation(p: Law, q: Law) -> float:
    return float(np.abs(p - q).sum() / 2)


weights = st.lists(st.integers(0, 100), min_size=30, max_size=30).filter(any)


@given(first=weights, second=weights, k=st.integers(0, 8))
def test_lemma_1_value_is_bounded_by_total_variation(first: list[int], second: list[int], k: int) -> None:
    p, q = (np.array(each) / sum(each) for each in (first, second))
    assert abs(value(p, k) - value(q, k)) <= len(p) * variation(p, q) + 1e-9
    assert cost(solve(np.arange(1, 31), q, k).positions, p) - value(p, k) <= 2 * len(p) * variation(p, q) + 1e-9


@pytest.mark.parametrize("samples", [50, 400, 3000])
@pytest.mark.parametrize("delta", [0.5, 0.1])
def test_theorem_3_plug_in_schedule_is_near_the_best(samples: int, delta: float) -> None:
    rng, n, k, trials = np.random.default_rng(3), 60, 4, 200
    law = rng.dirichlet(np.full(n, 0.5))
    bound = sqrt(n / samples) / 2 + sqrt(log(1 / delta) / (2 * samples))
    far = poor = 0
    for _ in range(trials):
        seen = rng.multinomial(samples, law) / samples
        far += variation(seen, law) > bound
        excess = cost(solve(np.arange(1, n + 1), seen, k).positions, law) - value(law, k)
        poor += excess > 2 * n * bound
    assert far <= delta * trials
    assert poor <= delta * trials


@pytest.mark.parametrize("beta", [0.9, 0.99])
@pytest.mark.parametrize("drift", [0.0, 0.002])
def test_theorem_4_decayed_histogram_tracks_a_drifting_distribution(beta: float, drift: float) -> None:
    n, steps, k = 40, 500, 4
    rng = np.random.default_rng(4)
    early, late = np.zeros(n), np.zeros(n)  # disjoint: a share that moves by drift is a variation of drift
    early[:20], late[20:] = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20))
    bound = sqrt(n * (1 - beta) / (1 + beta)) / 2 + drift * beta / (1 - beta)
    distances, excesses = [], []
    for _ in range(30):
        laws = [early + min(1.0, drift * step) * (late - early) for step in range(steps)]
        law, learned = laws[-1], Distribution(beta, alike=inf)
        learned.add([(int(rng.choice(n, p=now)) + 1, n + 1) for now in laws])
        depths, weight = learned.of(n + 1)
        seen = np.bincount(depths - 1, weights=weight, minlength=n) / weight.sum()
        distances.append(variation(seen, law))
        excesses.append(cost(solve(depths, weight, k).positions, law) - value(law, k))
    assert np.mean(distances) <= bound
    assert np.mean(excesses) <= 2 * n * bound
    assert np.mean(distances) > bound / 10  # the bound is not vacuous for this measurement

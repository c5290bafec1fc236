"""Optimal positions, and the theorems about them."""

from collections.abc import Callable
from itertools import combinations
from math import inf, log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.placement.balanced import balanced
from headwater.cache.placement.base import Edge, Path, Placement, PlacementQuery
from headwater.cache.placement.optimal.overlaps import Distribution
from headwater.cache.placement.optimal.program import recomputation, solve
from headwater.plan import Match
from headwater.request import Boundaries
from tests.cache.toy import LAYOUT, Tokens, Toy, words
from tests.support import examples

PAGE = LAYOUT.page_size
PAGE_OF_QUERY = 10


def nowhere() -> Path:
    return ()


def query(
    length: int, branch: int, path: Callable[[], Path] = nowhere, page: int = PAGE_OF_QUERY, answered: bool = True
) -> PlacementQuery:
    return PlacementQuery(length, Match(branch, 0, branch, Reason.DIVERGED), Boundaries(), page, answered, path)


def seen(policy: str, *depths: int) -> Placement:
    """The policy after requests that went along one edge to these depths, weighted alike."""
    placement = make_placement(policy)
    for depth in depths:
        placement.learn(query(2000, depth, lambda: (Edge(1, 1000),)))
    return placement


def test_new_prompt_has_the_overlap_distribution_of_all_requests() -> None:
    optimal = seen("optimal(2, beta=1, every=1, pooled=True)", 100, 100, 300, 500, 500, 500, 520)
    assert optimal.place(query(1000, 0)).checkpoints == solve([100, 300, 500, 520], [2, 1, 3, 1], 2, 10).positions
    assert optimal.place(query(1000, 0)).checkpoints == (100, 500)


def test_depths_beyond_the_prompt_count_at_its_end() -> None:
    optimal = seen("optimal(1, beta=1, every=1, end=False, pooled=True)", 100, 900, 900)
    assert optimal.place(query(401, 0, answered=False)).checkpoints == (400,)
    assert optimal.place(query(401, 0)).checkpoints == (100,)
    kept = seen("optimal(1, beta=1, every=1, pooled=True)", 100, 900, 900)
    assert kept.place(query(401, 0, answered=False)).checkpoints == (100, 400)


def test_known_edges_have_their_own_overlap_distribution() -> None:
    optimal = make_placement("optimal(1, beta=1, every=1)")
    for _ in range(20):
        optimal.learn(query(2000, 300, lambda: (Edge(1, 1000),)))
    for depth in (600, 610, 620):
        optimal.learn(query(2000, depth, lambda: (Edge(2, 1000),)))
    first, second = (query(2000, 900, lambda name=name: (Edge(name, 1000),)) for name in (1, 2))
    assert optimal.place(first).checkpoints == (300,)
    assert optimal.place(second).checkpoints == (600,)


def test_prompt_is_the_newest_sample_of_its_path() -> None:
    fresh = make_placement("optimal(3, pooled=True)")
    assert fresh.place(query(2000, 440)).checkpoints == (440,)
    assert 440 in make_placement("optimal(3)").place(query(2000, 440)).checkpoints


def test_known_and_new_part_weigh_as_all_overlaps_do() -> None:
    optimal = make_placement("optimal(1, beta=1, every=1, pooled=True)")
    for depth in (100, 1000, 1000, 1000):
        optimal.learn(query(2000, depth))
    placed = optimal.place(query(2000, 400, lambda: (Edge(5, 400),)))
    assert placed.checkpoints == solve([400, 1000], [2, 3], 1, 10).positions == (1000,)
    few = optimal.place(query(2000, 1000, lambda: (Edge(5, 1000),)))
    assert few.checkpoints == (1000,)


def test_optimal_is_balanced_before_any_overlap() -> None:
    fresh, even = make_placement("optimal(4)"), make_placement("balanced(4)")
    fresh.learn(query(900, 0))
    for length in (0, 9, 500, 4001):
        assert fresh.place(query(length, 0)) == even.place(query(length, 0))


def longer_and_shorter(policy: str) -> list[int]:
    """Positions in prompts of 1,000 and of 8,000 tokens, after requests of both lengths, left at 500 and at 300."""
    optimal = make_placement(policy)
    for turn in range(20):
        optimal.learn(query(1000 + turn, 500))
        optimal.learn(query(8000 + turn, 300))
    return [optimal.place(query(length, 0)).checkpoints[0] for length in (1000, 8000)]


def test_optimal_positions_follow_prompts_of_like_length() -> None:
    assert longer_and_shorter("optimal(1, beta=1, every=1)") == [500, 300]
    assert longer_and_shorter("optimal(1, beta=1, every=1, pooled=True)") == [300, 300]


def test_new_length_has_only_the_prior() -> None:
    optimal, even = make_placement("optimal(3, beta=1, every=1)"), make_placement("balanced(3)")
    for _ in range(20):
        optimal.learn(query(2000, 30))
    found, spread = (policy.place(query(9001, 0)).checkpoints for policy in (optimal, even))
    assert len(found) == len(spread) == 3
    assert all(abs(one - other) <= PAGE_OF_QUERY for one, other in zip(found, spread, strict=True))
    assert optimal.place(query(2000, 0)).checkpoints[0] == 30


def test_the_prior_weighs_as_one_request() -> None:
    """One checkpoint saves its depth in each request that reaches it: 100 tokens, or a half of what the prior may."""
    optimal = make_placement("optimal(1, beta=1, every=1)")
    depths = []
    for _ in range(4):
        optimal.learn(query(1000, 100))
        depths.append(optimal.place(query(1000, 0)).checkpoints[0])
    assert depths == best_with_the_prior(4)


def best_with_the_prior(most: int) -> list[int]:
    """The position that saves most if n requests reach 100 and one reaches each page of 1,000 as likely, by n."""
    pages = range(10, 1000, 10)
    saved = {
        n: {at: at * (n * (at <= 100) + sum(page >= at for page in pages) / len(pages)) for at in pages}
        for n in range(1, most + 1)
    }
    return [max(by, key=by.__getitem__) for by in saved.values()]


def test_the_answer_changes_every_ten_requests() -> None:
    optimal = make_placement("optimal(1)")
    before = optimal.place(query(1000, 0))
    answers = []
    for _ in range(10):
        optimal.learn(query(1000, 120))
        answers.append(optimal.place(query(1000, 0)))
    assert answers[:9] == [before] * 9
    assert answers[9].checkpoints == (120,)


def test_a_shift_of_the_traffic_is_followed() -> None:
    optimal = make_placement("optimal(1, beta=0.9, every=1)")
    for depth in [200] * 100 + [700] * 20:
        optimal.learn(query(2000, depth))
    assert optimal.place(query(2000, 0)).checkpoints == (700,)


def serve(toy: Toy, optimal: Placement, tokens: Tokens) -> int:
    """As the planner does: place, reserve, learn, commit. Returns where the request resumed."""
    match = toy.match(tokens)
    asked = PlacementQuery(len(tokens), match, Boundaries(), PAGE, path=lambda: toy.cache.path(toy.match(tokens)))
    draft = toy.draft(tokens, match.checkpoint_tokens, checkpoints=optimal.place(asked).checkpoints)
    plan = toy.reserve(draft)
    optimal.learn(asked)
    toy.commit(plan, draft)
    toy.release(draft.request)
    return match.checkpoint_tokens


def test_each_document_gets_checkpoints_at_its_branch_points() -> None:
    toy, optimal = Toy(), make_placement("optimal(1, every=1, end=False)")
    documents = {24: words(1, 60), 40: words(2, 60)}
    resumed = {
        depth: [serve(toy, optimal, document[:depth] + words(10 * depth + turn, 20)) for turn in range(5)]
        for depth, document in documents.items()
    }
    assert resumed[24][2:] == [24, 24, 24]
    assert resumed[40][2:] == [40, 40, 40]


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

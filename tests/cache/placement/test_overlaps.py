"""Overlap depths: weights, likeness of lengths, edges through splits, bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.cache.placement.base import Edge
from headwater.cache.placement.optimal.overlaps import MAX_REQUESTS, MAX_WEIGHT, Distribution, Overlaps
from tests.cache.toy import PAGE, Tokens, Toy, floor
from tests.support import examples

LENGTH = 200_000  # of all prompts, unless lengths are the question


def counting(every: int = 1, edges: int = 1000) -> Overlaps:
    return Overlaps(beta=1.0, every=every, edges=edges)


def common(a: Tokens, b: Tokens) -> int:
    """Tokens of the pages that both begin with."""
    alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return floor(alike)


prompts = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=10)


@settings(max_examples=examples(60))
@given(prompts=prompts, data=st.data())
def test_histogram_along_a_path_is_independent_of_splits(prompts: list[list[int]], data: st.DataObject) -> None:
    toy, overlaps = Toy(), counting()
    before: list[tuple[Tokens, int]] = []
    for pages in prompts:
        tokens = tuple(page for page in pages for _ in range(PAGE))
        match = toy.match(tokens)
        expected: dict[int, float] = {}
        for other, depth in before:
            if left := min(depth, common(other, tokens), match.kv_tokens):
                expected[left] = expected.get(left, 0.0) + 1.0
        assert overlaps.along(toy.cache.path(toy.match(tokens)), match.kv_tokens) == expected
        stops = data.draw(st.sets(st.integers(1, len(pages)), max_size=2))
        places = tuple(sorted(PAGE * stop for stop in {*stops, len(pages)}))
        ahead = tuple(at for at in places if at > match.checkpoint_tokens)
        draft = toy.draft(tokens, match.checkpoint_tokens, checkpoints=ahead)
        plan = toy.reserve(draft)
        overlaps.learn(toy.cache.path(toy.match(tokens)), match.branch_tokens, len(tokens))
        toy.commit(plan, draft)
        toy.release(draft.request)
        before.append((tokens, match.branch_tokens))


def test_upper_part_of_split_edge_begins_with_lower_histogram() -> None:
    overlaps = counting()
    overlaps.learn((Edge(7, 1000),), 300, LENGTH)
    overlaps.learn((Edge(7, 1000),), 800, LENGTH)
    split = (Edge(12, 500, origins=(7,)), Edge(9, 700))
    assert overlaps.along(split, 700) == {300: 1.0, 500: 1.0}
    overlaps.learn(split, 600, LENGTH)
    assert overlaps.along((Edge(12, 500, origins=(7,)), Edge(7, 1000)), 1000) == {300: 1.0, 500: 1.0, 800: 1.0}
    assert overlaps.along(split, 700) == {300: 1.0, 500: 1.0, 600: 1.0}


def test_an_edge_has_its_own_histogram() -> None:
    overlaps = counting()
    overlaps.learn((Edge(1, 100), Edge(2, 200)), 150, LENGTH)
    overlaps.learn((Edge(3, 100), Edge(4, 200)), 120, LENGTH)
    assert overlaps.along((Edge(1, 100), Edge(2, 200)), 200) == {150: 1.0}
    assert overlaps.along((Edge(3, 100), Edge(5, 200)), 200) == {100: 1.0}


def weights(distribution: Distribution, length: int) -> dict[int, float]:
    """The distribution for prompts of a length: depth to weight."""
    return {int(depth): float(weight) for depth, weight in zip(*distribution.of(length), strict=True)}


def test_each_request_weighs_one_over_beta_times_the_one_before() -> None:
    overlaps = Overlaps(beta=0.5, every=1, edges=10)
    for depth in (10, 20, 30):
        overlaps.learn((Edge(1, 100),), depth, LENGTH)
    expected = {10: 0.25, 20: 0.5, 30: 1.0}
    assert weights(overlaps.distribution, 7 * LENGTH) == expected
    assert {depth: w / overlaps.unit for depth, w in overlaps.along((Edge(1, 100),), 100).items()} == expected


def test_a_request_counts_the_less_the_more_the_lengths_differ() -> None:
    distribution = Distribution(beta=1.0, alike=0.1)
    distribution.add([(10, 1000), (20, 1100), (30, 800), (40, 5000)])
    found = weights(distribution, 1000)
    assert list(found) == [10, 20, 30]
    assert found[10] == 1.0
    for depth, length in ((20, 1100), (30, 800)):
        assert found[depth] == pytest.approx(math.exp(-0.5 * (math.log(length / 1000) / 0.1) ** 2))
    assert list(weights(distribution, 5001)) == [40]
    assert weights(distribution, 300) == {}


def test_weight_decays_by_later_requests_of_its_length() -> None:
    distribution = Distribution(beta=0.5, alike=0.1)
    distribution.add([(10, 1000), (20, 1000), *((30, 9000) for _ in range(50))])
    assert weights(distribution, 1000) == {10: 0.5, 20: 1.0}
    distribution.add([(40, 1105)])
    near = math.exp(-0.5 * (math.log(1.105) / 0.1) ** 2)
    assert weights(distribution, 1000) == pytest.approx({10: 0.5 ** (1 + near), 20: 0.5**near, 40: near})


def test_requests_begin_to_count_ten_at_a_time() -> None:
    overlaps = counting(every=10)
    for _ in range(9):
        overlaps.learn((Edge(1, 50),), 50, LENGTH)
    assert overlaps.distribution.empty
    assert overlaps.along((Edge(1, 50),), 50) == {}
    overlaps.learn((), 0, LENGTH)
    assert overlaps.distribution.of(LENGTH)[1].tolist() == [1.0] * 9
    assert overlaps.along((Edge(1, 50),), 50) == {50: 9.0}


def test_request_without_overlap_is_not_counted() -> None:
    overlaps = counting()
    overlaps.learn((), 0, LENGTH)
    assert overlaps.distribution.empty


def test_edges_that_were_used_longest_ago_are_forgotten() -> None:
    overlaps = counting(edges=2)
    for name in (1, 2, 1, 3):
        overlaps.learn((Edge(name, 50),), 50, LENGTH)
    assert [overlaps.along((Edge(name, 50),), 50) for name in (1, 2, 3)] == [{50: 2.0}, {}, {50: 1.0}]


@pytest.mark.parametrize("beta", [0.9, 0.97])
def test_weights_stay_finite_and_histograms_bounded(beta: float) -> None:
    overlaps = Overlaps(beta=beta, every=10, edges=4)
    for turn in range(9_000):
        overlaps.learn((Edge(turn % 3, 100_000),), 1 + turn, LENGTH)
    assert 0 < overlaps.unit <= MAX_WEIGHT / beta**10
    assert len(overlaps.distribution.of(LENGTH)[0]) == MAX_REQUESTS
    assert all(len(overlaps.along((Edge(name, 100_000),), 100_000)) <= 300 for name in range(3))
    depths, weights = overlaps.distribution.of(LENGTH)
    assert (depths[-1], weights[-1]) == (9_000, 1.0)

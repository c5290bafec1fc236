"""Rates of reuse, scores by them, and their renewal."""

import gc
from array import array
from collections import deque
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.eviction import headwater
from headwater.cache.eviction.base import rows
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.base.rows import view
from headwater.cache.eviction.headwater import Headwater, ghosts, order
from headwater.cache.eviction.headwater.order import Ranking
from headwater.cache.eviction.headwater.rates import (
    BUCKETS,
    EDGES,
    MIDDLES,
    WIDTHS,
    ReuseRates,
    bucket,
    buckets,
    class_of,
    class_of_tail,
)
from headwater.cache.node import Node
from tests.cache.eviction.test_headwater import SMALL
from tests.cache.toy import Toy, evict, words

SLICE = 16


def filled() -> tuple[Toy, Headwater]:
    """A cache of 100 checkpoints, and ghost entries, without a renewal so far."""
    toy = Toy(replace(SMALL, n_pages=1000, state_fraction=0.1), "headwater")
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    rng = Random(5)
    for first in range(300):
        toy.serve((*words(rng.randrange(40), 4 * rng.randrange(1, 6)), *words(first + 100, 4 * rng.randrange(1, 9))))
    return toy, policy


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (headwater, rows, ghosts, order):
        monkeypatch.setattr(module, "MAX_SLICE_ROWS", SLICE)


def test_parts_of_a_renewal_are_bounded_and_count_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, whole), (_, parted) = filled(), filled()
    deque(whole._renewal())
    for module in (headwater, rows, ghosts, order):
        monkeypatch.setattr(module, "MAX_SLICE_ROWS", SLICE)
    monkeypatch.setattr(ghosts, "WATCHED_FRACTION", 1)
    parts = list(parted._renewal())
    assert max(parts) == SLICE
    assert len(parts) > len(parted.candidates) // SLICE
    assert np.array_equal(parted.rates.time, whole.rates.time)
    assert np.array_equal(parted.rates.index, whole.rates.index)


def test_rates_of_tails_are_learned_from_the_tokens_used() -> None:
    _, policy = filled()
    rates, unused, used = policy.rates, class_of_tail(300, 0), class_of_tail(300, 1)
    for _ in range(300):
        policy.tail_watched(position=300, uses=0, age=20, used=0.75)
        policy.tail_watched(position=300, uses=1, age=20, used=0.0)
    rates.renew()
    assert rates.reuses[[unused, used]].sum(axis=1) == pytest.approx([0.97 * 225, 0])
    assert rates.time[[unused, used]].sum(axis=1) == pytest.approx([0.97 * 6000] * 2)
    assert rates.at(unused, 20) > 10 * rates.at(used, 20)


@pytest.mark.parametrize(("hits", "uses"), [(0, 0), (1, 2), (3, 4), (1000, 255)])
def test_tail_is_not_used_more_often_than_leaves(hits: int, uses: int) -> None:
    _, policy = filled()
    rates, leaf = policy.rates, Node(None, b"", array("i"), end=40, serial=0, live=1)
    kinds = class_of(leaf, uses, unit_tokens=4), class_of_tail(160, hits)
    for kind in kinds:
        rates.index[list(kinds)], rates.index[kind] = 3.0, 2.0
        rates.index_of = rates.index.ravel().data
        assert policy.tail_rate(160, hits, age=9) == 2.0


def test_ghost_entries_are_watched_in_turns(monkeypatch: pytest.MonkeyPatch, sliced: None) -> None:
    _, policy = filled()
    entries, limit = policy.ghosts, len(policy.ghosts)
    assert limit > 8 * SLICE
    now = policy._now + 100
    seen = set()
    for _ in range(8):
        deque(entries.renew(limit, now))
        seen |= {row for row in range(limit) if entries.watched[row] == now - entries.time[row]}
    assert len(seen) == limit


def test_ranking_in_slices_has_the_lowest_scores_while_rows_leave(
    sliced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "RANKED_FRACTION", 4)
    _, policy = filled()
    kept, now, rng = policy.candidates, policy._now, Random(2)
    scores = dict(zip(kept.keys, kept.scores(now).tolist(), strict=True))
    for _ in kept.rank_all(now):
        for node in rng.sample(kept.keys, 3):
            kept.leave(node, now)
            del scores[node]
    bound = kept.ranking.bound
    expected = sorted((score, node.serial, node) for node, score in scores.items() if score <= bound)
    assert len(kept.ranking.ranked) == len(expected) > 3
    for *_, node in expected:
        assert kept.ranking.lowest() is node
        kept.ranking.discard(node)
    assert kept.ranking.lowest() is None


def test_eviction_of_more_than_is_ranked_in_one_tick_finds_victims(sliced: None) -> None:
    toy, policy = filled()
    for left in range(len(policy.candidates) - 1, -1, -1):
        victim = policy.victim(Room.STATE, toy.cache.now)
        assert victim is not None
        evict(toy.cache, Room.STATE)
        assert len(policy.candidates) == left


NODES = [Node(None, b"", array("i"), 0, serial) for serial in range(8)]
SCORES = st.integers(0, 9).map(float)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "discard", "lowest"]), st.integers(0, 7), SCORES), max_size=100
)


@given(st.lists(SCORES, min_size=8, max_size=8), st.integers(1, 8), STEPS)
def test_lowest_is_that_of_all_scores_until_ranked_are_used_up(
    scores: list[float], number: int, steps: list[tuple[str, int, float]]
) -> None:
    of = dict(zip(NODES, scores, strict=True))
    ranked = sorted((score, node.serial, node) for node, score in of.items())[:number]
    ranking = Ranking(ranked[-1][0])
    for run in (ranked[::2], ranked[1::2]):
        ranking.rank([node for *_, node in run], [score for score, *_ in run])
    unchanged = {node for *_, node in ranked}
    for step, at, score in steps:
        node = NODES[at]
        if step == "put":
            ranking.put(node, score)
            of[node] = score
            unchanged.discard(node)
        elif step == "discard":
            ranking.discard(node)
            of.pop(node, None)
            unchanged.discard(node)
        lowest = min(((score, node.serial, node) for node, score in of.items()), default=None)
        assert ranking.lowest() is (lowest[2] if lowest is not None and unchanged else None)


def test_node_that_is_ranked_again_has_the_later_score() -> None:
    ranking = Ranking(9.0)
    ranking.rank(NODES[:2], [1.0, 2.0])
    ranking.rank(NODES[:1], [3.0])
    assert ranking.lowest() is NODES[1]
    ranking.put(NODES[1], 4.0)
    assert ranking.lowest() is NODES[0]
    ranking.rank(NODES[1:2], [2.0])
    assert ranking.lowest() is NODES[1]


def test_ranking_many_nodes_adds_few_objects_to_garbage_collection() -> None:
    nodes = [Node(None, b"", array("i"), 0, serial) for serial in range(1000)]
    ranking = Ranking(1.0)
    before = len(gc.get_objects())
    for start in range(0, len(nodes), 100):
        ranking.rank(nodes[start : start + 100], [1.0] * 100)
    assert len(gc.get_objects()) - before < 100


def test_ranking_before_the_last_is_emptied_while_the_next_is_made(
    sliced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "RANKED_FRACTION", 4)
    toy, policy = filled()
    kept = policy.candidates
    deque(kept.rank_all(toy.cache.now))
    last = kept.ranking
    deque(kept.rank_all(toy.cache.now))
    assert last.ranked
    deque(kept.rank_all(toy.cache.now))
    assert not last.ranked


def test_empty_ranking_has_no_lowest() -> None:
    ranking = Ranking()
    assert ranking.lowest() is None
    ranking.put(NODES[0], 0.0)
    assert ranking.lowest() is None


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

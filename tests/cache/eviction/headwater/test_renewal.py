"""Renewals of rates and ranking in parts: each part is bounded, and together they do what one renewal does at once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from headwater.cache.eviction import headwater
from headwater.cache.eviction.base import rows
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.headwater import Headwater, ghosts, order
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
    assert kept.ranking.left == len(expected) > 3
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

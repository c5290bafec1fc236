"""Headwater's own policy: its order before anything is known, and the order that it learns."""

from collections import deque
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from headwater.cache import PrefixCache
from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.base.rows import Column
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.eviction.headwater import Headwater, order
from headwater.cache.eviction.headwater.order import Candidates
from headwater.cache.eviction.headwater.rates import BRANCH_CLASSES, DEPTH_CLASSES, PRIOR_USES
from headwater.cache.node import Node
from headwater.errors import ConfigError, OutOfPages
from tests.cache.toy import LAYOUT, Tokens, Toy, assert_worths_are_those_of_now, dump, evict, floor, key_of, words

SMALL = replace(LAYOUT, checkpoint_pages=1, slot_pages=0)


def split(states: int) -> Toy:
    return Toy(replace(SMALL, n_pages=100, state_fraction=states / 100), "headwater")


def resumes(toy: Toy, first: int, count: int) -> int:
    return toy.match((*words(first, count), 0)).checkpoint_tokens


def test_superseded_checkpoint_is_evicted_before_an_older_deepest_one() -> None:
    toy = split(3)
    toy.serve(words(1, 8))
    toy.serve(words(2, 8))
    toy.serve((*words(2, 8), *words(9, 40)))  # resumes at 8
    toy.serve(words(3, 40))  # 8/3 * 1/56 of the first, 8/1 * 2/8/20 of the second: the lower one goes
    toy.serve(words(4, 40))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8), resumes(toy, 3, 40)) == (0, 0, 40)


def test_a_branch_point_outlives_its_branches() -> None:
    toy = split(3)
    for branch in (2, 3, 4, 5):
        toy.serve((*words(1, 8), *words(branch, 8)), checkpoints=(8, 16))
    assert resumes(toy, 1, 8) == 8
    assert toy.cache.stats().evicted_checkpoints == 2


def test_checkpoint_with_a_hit_stays_longer() -> None:
    toy = split(3)
    for first in (1, 2):
        toy.serve(words(first, 8))
    toy.serve((*words(1, 8), 0), checkpoints=())
    for first in (3, 4):
        toy.serve(words(first, 8))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8)) == (8, 0)


def test_checkpoint_that_saves_less_a_page_is_evicted_at_equal_age() -> None:
    toy = split(2)
    toy.serve(words(1, 8))
    toy.serve(words(2, 40))  # 40 tokens on 11 pages, and 8 on 3
    toy.serve(words(3, 8))
    assert (resumes(toy, 1, 8), resumes(toy, 2, 40)) == (0, 40)


def test_checkpoint_above_an_evicted_deepest_one_counts_again() -> None:
    toy = split(2)
    toy.serve(words(1, 8))
    toy.serve(words(1, 16))
    deeper = next(node for node in toy.cache.index if node.end == 4)
    toy.cache.pool.states.give(toy.cache.index.drop(deeper))
    toy.serve(words(2, 8))
    toy.serve(words(3, 8))  # 8/1 * 2/40 of the first, which was used, against 8/3 * 1/20 of the second
    assert (resumes(toy, 1, 8), resumes(toy, 2, 8)) == (8, 0)


def round_robin(policy: str, states: int, requests: int, documents: int = 8) -> list[int]:
    """Tokens at which each request resumed, of questions about documents that are asked in turns."""
    toy = Toy(replace(SMALL, n_pages=300, state_fraction=states / 300), policy)
    return [
        toy.serve((*words(1 + i % documents, 24), *words(100 + i, 4)), checkpoints=(24,)).checkpoint_tokens
        for i in range(requests)
    ]


def test_documents_in_turns_are_kept_once_late_reuse_is_learned() -> None:
    """LRU evicts each document just before it is used: 0 hits. Half of them fit."""
    assert sum(round_robin("lru", 4, 400)) == 0
    late = round_robin("headwater", 4, 400)[200:]
    assert sum(late) >= 24 * len(late) // 4


def kept_of(toy: Toy) -> Candidates:
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    policy.victim(Room.STATE, toy.cache.now)
    return policy.candidates


def many(monkeypatch: pytest.MonkeyPatch, ranked: int) -> Toy:
    """A cache of 100 checkpoints, of which one in `ranked` is ranked at once."""
    monkeypatch.setattr(order, "RANKED_FRACTION", ranked)
    toy, rng = Toy(replace(SMALL, n_pages=1000, state_fraction=0.1), "headwater"), Random(5)
    for first in range(300):
        toy.serve((*words(rng.randrange(40), 4 * rng.randrange(1, 6)), *words(first + 100, 4 * rng.randrange(1, 9))))
    return toy


def test_ranked_checkpoints_are_evicted_in_order_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = many(monkeypatch, 4)
    policy, kept = toy.cache.policy, kept_of(toy)
    deque(kept.rank_all(toy.cache.now))
    scores = zip(kept.scores(toy.cache.now), kept.keys, strict=True)
    expected = [node for *_, node in sorted((score, node.serial, node) for score, node in scores)][:10]
    found = []
    for _ in range(10):
        victim = policy.victim(Room.STATE, toy.cache.now)
        assert victim is not None
        found.append(victim[0])
        evict(toy.cache, Room.STATE)
    assert len(kept.ranking.ranked) > 1
    assert found == expected


def test_changed_checkpoint_is_evicted_by_its_new_score(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = many(monkeypatch, 4)
    kept, now = kept_of(toy), toy.cache.now
    deque(kept.rank_all(now))
    scores = dict(zip(kept.keys, kept.scores(now), strict=True))
    first, second, *_, unranked = sorted(kept.keys, key=lambda node: (scores[node], node.serial))

    def change(node: Node, worth: float) -> None:
        monkeypatch.setattr(Worth, "of", lambda *_: worth)
        kept.changed.add(node)
        kept.settle(now)

    assert kept.lowest(now, False, float) is first
    change(first, 1e9)
    assert kept.lowest(now, False, float) is second
    change(unranked, 1e-9)
    assert kept.lowest(now, False, float) is unranked


def with_one_checkpoint() -> tuple[Toy, Column, int]:
    """A cache with one checkpoint; times in memory by class and age, which do not decay; when it was taken."""
    toy = split(3)
    toy.serve(words(1, 8))
    kept = kept_of(toy)
    kept._rates._decay = 1.0
    return toy, kept._rates.time, kept.time[0]


def test_time_in_memory_is_counted_once() -> None:
    toy, counted, since = with_one_checkpoint()
    kept = kept_of(toy)
    for now in (since + 10, since + 20, since + 30):
        deque(kept.watch_all(now))
        kept._rates.renew()
    assert counted.sum() == 30


def test_time_before_a_change_of_class_is_counted_once() -> None:
    toy, counted, since = with_one_checkpoint()
    kept = kept_of(toy)
    kept.change(0, kept.kind[0], since + 10)
    deque(kept.watch_all(since + 30))
    kept._rates.renew()
    assert counted.sum() == 30


def test_a_checkpoint_is_worth_more_once_the_one_above_is_gone() -> None:
    toy = split(3)
    toy.serve(words(1, 8))
    toy.serve(words(1, 16))
    kept = kept_of(toy)
    upper, lower = sorted(kept.keys, key=lambda node: node.end)
    before = kept.worth[kept.row_of[lower]]
    toy.cache.pool.states.give(toy.cache.index.drop(upper))
    assert kept_of(toy).worth[kept.row_of[lower]] == Worth(toy.layout).of(lower) > before


def test_worth_of_a_checkpoint_resumed_without_hold_counts_its_own_page() -> None:
    toy = split(4)
    tokens, request = words(1, 16), 77
    for start, end in ((0, 8), (8, 16)):
        legs = {"request": request, "checkpoints": (end,), "hold_checkpoint": False, "slot": not start}
        draft = toy.draft(tokens[:end], start, **legs)
        toy.commit(toy.reserve(draft), draft)
        assert_worths_are_those_of_now(toy.cache)
    toy.release(request)
    assert_worths_are_those_of_now(toy.cache)


def test_kv_of_a_leaf_is_its_own_after_the_other_branch_left() -> None:
    toy = split(4)
    toy.serve((*words(1, 80), *words(2, 8)))
    leaf = toy.cache.index.find("", key_of((*words(1, 80), *words(2, 8))), 22)[0][-1]
    alone = kept_of(toy).worth[kept_of(toy).row_of[leaf]]
    toy.serve((*words(1, 80), *words(3, 8)), checkpoints=())
    shared = kept_of(toy).worth[kept_of(toy).row_of[leaf]]
    assert shared > alone
    assert_worths_are_those_of_now(toy.cache)
    evict(toy.cache, Room.KV)
    evict(toy.cache, Room.KV)
    assert kept_of(toy).worth[kept_of(toy).row_of[leaf]] == alone


@pytest.mark.parametrize("seed", range(10))
def test_worths_are_current_after_any_changes(seed: int) -> None:
    rng, open_requests = Random(seed), list[int]()
    toy = Toy(replace(SMALL, n_pages=60, state_fraction=rng.choice((0.1, 0.3))), "headwater")
    for _ in range(200):
        prompt: Tokens = (0,)
        for depth in range(rng.randrange(1, 4)):
            prompt = (*prompt[:-1], *words(10 * depth + rng.randrange(3), 4 * rng.randrange(1, 6)), depth)
        start, end = toy.match(prompt).checkpoint_tokens, floor(len(prompt))
        taken = (end,) if end > start and rng.random() < 0.6 else ()
        draft = toy.draft(prompt, start, checkpoints=taken, hold_checkpoint=rng.random() < 0.5)
        with suppress(OutOfPages):
            toy.commit(toy.reserve(draft), draft)
            open_requests.append(draft.request)
        assert_worths_are_those_of_now(toy.cache)
        while open_requests and rng.random() < 0.7:
            toy.release(open_requests.pop(rng.randrange(len(open_requests))))
            assert_worths_are_those_of_now(toy.cache)
    assert toy.cache.stats().evicted_checkpoints


def test_before_anything_is_known_place_and_uses_decide() -> None:
    policy = make_eviction("headwater(superseded=4, branch=3)", SMALL)
    assert isinstance(policy, Headwater)
    *checkpoints, of_tails, of_used_tails = policy.rates.index[::DEPTH_CLASSES]
    index = np.reshape(checkpoints, (BRANCH_CLASSES, len(PRIOR_USES), -1))
    assert np.allclose(index[1], index[0] / 4)
    assert np.allclose(index[2], index[0] * 3)
    assert np.allclose(index[:, 1:], index[:, :1] * np.array([2, 2, 3, 3, 3, 4])[:, None])
    assert np.allclose((of_tails, of_used_tails), (index[0, 0], 2 * index[0, 0]))


def test_uses_of_a_snapshot_are_known() -> None:
    toy = split(3)
    toy.serve(words(1, 8))
    for _ in range(3):
        toy.serve((*words(1, 8), 0), checkpoints=())
    cache = PrefixCache(toy.layout, "headwater", toy.cache.snapshot())
    policy = cache.policy
    assert isinstance(policy, Headwater)
    assert policy.candidates.uses[: len(policy.candidates)].tolist() == [4]  # 1 more than requests


def test_the_prefill_of_an_answer_is_a_class_and_no_use() -> None:
    toy = split(3)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)

    def uses() -> tuple[int, float]:
        node = next(node for node in toy.cache.index if node.end == 2)
        return policy.candidates.uses[policy.candidates.row_of[node]], float(policy.rates.reuses.sum())

    toy.serve(words(1, 8))
    assert uses() == (0, 0)
    toy.serve((*words(1, 8), *words(2, 8)), counts=False)
    toy.serve((*words(1, 8), *words(3, 8)), counts=False)
    assert uses() == (1, 0)
    toy.serve((*words(1, 8), *words(4, 8)))
    assert uses() == (2, 1)
    toy.serve((*words(1, 8), *words(5, 8)), counts=False)
    assert uses() == (2, 1)


def test_after_the_prefill_of_an_answer_time_counts_from_that_use_on() -> None:
    toy, counted, taken = with_one_checkpoint()
    kept = kept_of(toy)
    toy.serve((*words(1, 8), *words(2, 8)), counts=False)
    (row,) = (kept.row_of[node] for node in kept.keys if node.end == 2)
    used = kept.time[row]
    deque(kept.watch_all(used + 20))
    kept._rates.renew()
    of_answers = [
        kind for kind in range(len(counted)) if kind % (len(PRIOR_USES) * DEPTH_CLASSES) // DEPTH_CLASSES == 1
    ]
    assert used > taken
    assert counted[of_answers].sum() == 20  # as a checkpoint at which an answer resumed
    assert counted[of_answers, :7].sum() == 12  # at ages below 12


def test_rates_are_renewed_when_a_fraction_was_saved_or_used(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = list[int]()
    monkeypatch.setattr(Candidates, "watch_all", lambda kept, now: iter([renewed.append(len(kept)) or 0]))
    toy = Toy(replace(SMALL, n_pages=1000, state_fraction=0.5), "headwater")
    monkeypatch.setattr("headwater.cache.eviction.headwater.MIN_NOTED", 4)
    monkeypatch.setattr("headwater.cache.eviction.headwater.NOTED_FRACTION", 2)
    for first in range(40):
        toy.serve(words(first, 8))
    assert renewed == [4, 8, 15, 29]


def test_a_model_without_states_needs_no_history() -> None:
    assert make_eviction("headwater", SMALL).keeps_history
    assert not make_eviction("headwater", replace(SMALL, checkpoint_pages=0, resumable="every_page")).keeps_history


def test_asking_for_a_ranked_victim_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = many(monkeypatch, 4), many(monkeypatch, 4)
    for first in range(500, 560):
        asked.cache.policy.victim(Room.STATE, asked.cache.now)
        for toy in (asked, other):
            toy.serve(words(first, 12))
    assert dump(asked.cache) == dump(other.cache)


@pytest.mark.parametrize("spelling", ["headwater(superseded=0)", "headwater(branch=-1.0)"])
def test_factors_are_above_zero(spelling: str) -> None:
    with pytest.raises(ConfigError):
        make_eviction(spelling, SMALL)

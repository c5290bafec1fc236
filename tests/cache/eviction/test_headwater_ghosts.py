"""Ghosts of the default policy: their table, and what it learns from them."""

from collections import deque
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from headwater.cache import PrefixCache
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.eviction.headwater.ghosts import Ghosts, prefix_ids
from headwater.cache.eviction.headwater.order import Candidates
from headwater.cache.eviction.headwater.rates import CLASS_OF_USES, CLASSES_A_BRANCH, MIDDLES, ReuseRates, bucket
from tests.cache.eviction.test_headwater import SMALL, resumes, split
from tests.cache.toy import LAYOUT, Toy, evict, key_of, words


def taught(toy: Toy) -> tuple[float, list[int]]:
    """Uses that were noted so far, and the numbers of uses of what is in memory, by depth."""
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    kept = policy.candidates
    by_depth = sorted(kept.keys, key=lambda node: node.end)
    return float(policy.rates.reuses.sum()), [kept.uses[kept.row_of[node]] for node in by_depth]


def test_evicted_checkpoint_still_teaches_and_has_its_uses_again() -> None:
    toy = split(1)
    toy.serve(words(1, 8))
    toy.serve((*words(1, 8), 0), checkpoints=())
    assert taught(toy) == (1, [2])  # 1 more than requests
    toy.serve(words(2, 12))
    assert resumes(toy, 1, 8) == 0
    toy.serve((*words(1, 8), 0))  # would have resumed there
    assert taught(toy) == (2, [3])
    toy.serve((*words(1, 8), 0), checkpoints=())
    assert taught(toy) == (3, [4])


def test_ghost_that_is_not_saved_again_is_used_each_time() -> None:
    toy = split(1)
    toy.serve(words(1, 8))
    toy.serve(words(2, 8))
    for uses in (1, 2, 3):
        toy.serve((*words(1, 8), uses), checkpoints=())
        assert taught(toy) == (uses, [0])
    toy.serve((*words(1, 8), *words(4, 8)), counts=False, checkpoints=())  # the prefill of an answer is no use
    assert taught(toy) == (3, [0])
    toy.serve((*words(1, 8), 4))
    assert taught(toy) == (4, [5])


def drop(toy: Toy, end: int) -> None:
    """Evict a checkpoint at `end` tokens."""
    index, unit = toy.cache.index, LAYOUT.unit_tokens
    found = next(node for node in index if node.end * unit == end and node.checkpoint is not None)
    toy.cache.pool.states.give(index.drop(found))


def ghosts(toy: Toy) -> list[tuple[int, int]]:
    """Branches by class, and uses, of the ghosts, sorted."""
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    return sorted(
        (kind // CLASSES_A_BRANCH, uses) for kind, uses in zip(policy.ghosts.kind, policy.ghosts.uses, strict=True)
    )


@pytest.mark.parametrize(("evicted", "uses"), [((16, 8), [2, 2]), ((8, 16), [0, 2])])
def test_a_ghost_above_the_deepest_is_used_unless_it_had_one_below(evicted: tuple[int, ...], uses: list[int]) -> None:
    toy = split(2)
    prompt = (*words(1, 8), *words(2, 8))
    toy.serve(prompt, checkpoints=(8, 16))
    for end in evicted:
        drop(toy, end)
    toy.serve((*prompt, 0), checkpoints=(8, 16))
    assert taught(toy) == (sum(n > 0 for n in uses), uses)


def test_a_ghost_above_the_deepest_is_used_once() -> None:
    toy = split(2)
    prompt = (*words(1, 8), *words(2, 8))
    toy.serve(prompt, checkpoints=(8, 16))
    for end in (16, 8):
        drop(toy, end)
    for i in range(3):
        toy.serve((*prompt, i), checkpoints=())
        assert ghosts(toy) == [(0, 2 + i), (1, 2)]
    assert taught(toy)[0] == 1 + 3
    toy.serve((*words(1, 8), 0), checkpoints=())  # of this prompt it is the deepest
    assert ghosts(toy) == [(0, 4), (1, 3)]


@pytest.mark.parametrize(("evicted", "uses"), [((8, 16, 16), (2, 4)), ((16, 16, 8), (2, 3))])
def test_a_branch_point_is_used_each_time_if_it_had_branches(evicted: tuple[int, ...], uses: tuple[int, int]) -> None:
    toy = split(3)
    for first in (2, 3):
        toy.serve((*words(1, 8), *words(first, 8)), checkpoints=(8, 16))
    for end in evicted:
        drop(toy, end)
    before, _ = taught(toy)
    for first, more in zip((2, 3), uses, strict=True):
        toy.serve((*words(1, 8), *words(first, 8), 0), checkpoints=())
        assert taught(toy)[0] == before + more
    assert max(ghosts(toy))[0] == (2 if evicted[0] == 8 else 1)


def test_the_class_of_a_used_ghost_keeps_its_depth() -> None:
    toy = split(1)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    toy.serve(words(1, 320))
    drop(toy, 320)
    toy.serve((*words(1, 320), 0), checkpoints=())
    assert policy.ghosts.kind.tolist() == [CLASS_OF_USES[2] + 1]


def test_a_request_that_resumes_uses_a_deeper_ghost_too() -> None:
    toy = split(2)
    prompt = (*words(1, 8), *words(2, 8))
    toy.serve(prompt, checkpoints=(8, 16))
    drop(toy, 16)
    assert toy.serve((*prompt, 0), checkpoints=()).checkpoint_tokens == 8
    assert taught(toy) == (2, [2])
    assert ghosts(toy) == [(0, 2)]


def test_ghost_above_the_resumed_checkpoint_is_not_used() -> None:
    toy = split(2)
    toy.serve((*words(1, 8), *words(2, 24)), checkpoints=(8, 32))
    drop(toy, 8)
    toy.serve((*words(1, 8), *words(2, 24), 0), checkpoints=())
    assert taught(toy) == (1, [2])
    toy.serve((*words(1, 8), 0), checkpoints=())
    assert taught(toy) == (2, [2])


def test_another_namespace_uses_nothing() -> None:
    toy = split(1)
    toy.serve(words(1, 8), namespace="a")
    toy.serve(words(2, 8), namespace="b")
    toy.serve((*words(1, 8), 0), namespace="b", checkpoints=())
    assert taught(toy) == (0, [0])
    toy.serve((*words(1, 8), 0), namespace="a", checkpoints=())
    assert taught(toy) == (1, [0])


def test_replaced_or_ended_checkpoints_leave_no_ghost() -> None:
    toy = split(3)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    toy.serve(words(1, 8))
    toy.cache.pool.states.give(toy.cache.index.drop(next(iter(toy.cache.index)), evicted=False))
    toy.serve(words(2, 8))
    toy.cache.end_conversation("", key_of(words(2, 8)))
    evict(toy.cache, Room.STATE)
    assert toy.cache.stats().checkpoints == len(policy.ghosts) == 0


def test_eight_to_nine_are_remembered_for_each_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cache.eviction.headwater.MIN_NOTED", 1)
    monkeypatch.setattr("headwater.cache.eviction.headwater.NOTED_FRACTION", 2)
    toy = split(3)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    for first in range(1, 100):
        toy.serve(words(first, 8))
        assert len(policy.ghosts) <= 9 * 3 + 1
    toy.serve((*words(60, 8), 0), checkpoints=())
    assert taught(toy)[0] == 0  # long ago
    toy.serve((*words(90, 8), 0), checkpoints=())
    assert taught(toy)[0] == 0.97  # once, and the rates were renewed


def test_a_document_that_is_asked_about_rarely_but_again_and_again_stays() -> None:
    """Beside prompts that never come again; until it is known, it is evicted each time before it is used."""
    toy = Toy(replace(SMALL, n_pages=300, state_fraction=3 / 300), "headwater")
    found = []
    for i in range(400):
        document = 1000 + i if i % 8 else 1
        found.append(toy.serve((*words(document, 24), *words(2000 + i, 4)), checkpoints=(24,)).checkpoint_tokens)
    assert found[8:17:8] == [0, 0]
    assert sum(found[200:]) >= 24 * 20  # of 25


def test_nothing_can_resume_at_the_end_of_a_prompt() -> None:
    toy = split(2)
    toy.serve((*words(1, 8), 0), checkpoints=(4, 8))
    for first in (3, 4):
        toy.serve(words(first, 80))
    toy.serve(words(1, 8), checkpoints=())  # at most at 4
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    assert sorted(policy.ghosts.uses) == [0, 2]
    toy.serve((*words(1, 8), 0), checkpoints=())
    assert sorted(policy.ghosts.uses) == [2, 2]


def test_a_guess_at_the_same_place_leaves_the_ghost() -> None:
    toy = split(1)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    toy.serve(words(1, 8))
    toy.serve((*words(1, 8), 0), checkpoints=())
    toy.serve(words(2, 8))
    assert policy.ghosts.uses.tolist() == [2]
    evict(toy.cache, Room.STATE)
    toy.serve((*words(1, 8), 5), checkpoints=(), speculative=(8,))
    assert 3 in policy.ghosts.uses
    toy.serve(words(2, 8))
    assert 3 in policy.ghosts.uses


def test_requests_that_take_nothing_renew_the_rates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = list[int]()
    monkeypatch.setattr(Candidates, "watch_all", lambda kept, now: iter([renewed.append(len(kept)) or 0]))
    toy = split(1)
    toy.serve(words(1, 8))
    toy.serve(words(2, 8))
    for i in range(130):
        toy.serve((*words(1, 8), i), checkpoints=())
    assert len(renewed) == 2


def test_ids_of_a_snapshot_are_those_of_namespace_and_prefix() -> None:
    toy = Toy(replace(SMALL, n_pages=100), "headwater")
    toy.serve(words(1, 8), namespace="a")
    toy.serve(words(1, 16), namespace="a")
    toy.serve(words(9, 8), namespace="b")
    cache = PrefixCache(toy.layout, "headwater", toy.cache.snapshot())
    policy = cache.policy
    assert isinstance(policy, Headwater)
    for row, node in enumerate(policy.candidates.keys):
        before = hash(cache.index.namespace(node))
        assert policy.candidates.prefix[row] == prefix_ids(cache.index.key_of(node), LAYOUT.unit_bytes, before)[-1]
    assert len(set(policy.candidates.prefix)) == 3


CLASSES = 4


def new_ghosts() -> Ghosts:
    rates = ReuseRates(1 / MIDDLES.reshape(1, -1).repeat(CLASSES, axis=0), group=1)
    rates._decay = 1.0
    return Ghosts(rates)


def counted(ghosts: Ghosts) -> tuple[float, float]:
    """Uses and time that were noted."""
    ghosts._rates.renew()
    return float(ghosts._rates.reuses.sum()), float(ghosts._rates.time.sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_table_is_that_of_a_dict(seed: int) -> None:
    rng, ghosts = Random(seed), new_ghosts()
    expected: dict[int, tuple[int, int, int, int]] = {}  # class, uses, last use, and the last event
    for now in range(1, 3000):
        prefix = rng.choice((rng.randrange(-9, 9), rng.getrandbits(63), rng.choice([0, *expected])))
        done = rng.random()
        if done < 0.6:
            one = rng.randrange(CLASSES), rng.randrange(256), rng.randrange(now)
            ghosts.put(prefix, *one, now)
            expected[prefix] = (*one, now)
        elif done < 0.9:
            uses = ghosts.take(prefix, now)
            assert uses == expected.pop(prefix, (0, 0))[1]
        elif prefix in expected:
            (row,) = ghosts.found([prefix])
            ghosts.use(row, 1, 7, now)
            expected[prefix] = 1, 7, now, now
        if now % 500 == 0:
            deque(ghosts.renew(len(expected), now))
            assert len(ghosts) == len(expected)
            deque(ghosts.renew(40, now))
            latest = sorted(expected, key=lambda prefix: -expected[prefix][-1])[:40]
            expected = {prefix: expected[prefix] for prefix in latest}
    assert len(ghosts) == len(expected) > 40
    assert sorted(ghosts.row_of, key=lambda prefix: expected[prefix][-1]) == list(ghosts.row_of)
    for prefix, (kind, uses, time, _) in expected.items():
        (row,) = ghosts.found([prefix])
        assert (ghosts.kind[row], ghosts.uses[row], ghosts.time[row]) == (kind, uses, time)


def test_time_of_a_ghost_until_it_leaves_is_counted_once() -> None:
    ghosts = new_ghosts()
    for prefix in (1, 2, 3):
        ghosts.put(prefix, 0, 2, time=100, now=100 + 10 * prefix)
    assert counted(ghosts) == (0, 0)
    assert ghosts.take(1, 150) == 2  # 40 after it was evicted
    assert counted(ghosts) == (0, 40)
    ghosts.use(*ghosts.found([3]), 1, 3, 160)  # 30 after it was evicted
    assert counted(ghosts) == (1, 70)
    assert ghosts._rates.reuses[0, bucket(60)] == 1
    deque(ghosts.renew(1, 200))  # 80 of the second after it was evicted, 40 of the third after its use, which stays
    assert [ghosts.found([prefix]) for prefix in (1, 2, 3)] == [[], [], [0]]
    assert counted(ghosts) == (1, 190)
    deque(ghosts.renew(1, 300))
    deque(ghosts.renew(0, 310))
    assert len(ghosts) == 0
    assert counted(ghosts) == (1, 300)
    assert np.array_equal(ghosts._rates.time[2:], np.zeros((CLASSES - 2, len(MIDDLES))))


def test_rows_of_known_prefixes_are_found_in_order() -> None:
    ghosts = new_ghosts()
    for prefix in (5, 6):
        ghosts.put(prefix, prefix - 5, 0, 0, 1)
    assert [ghosts.kind[row] for row in ghosts.found([9, 6, 7, 5])] == [0, 1]  # the last one first
    assert ghosts.found([9]) == []


def test_ids_of_a_key_that_is_continued_are_those_of_the_whole() -> None:
    key = bytes(range(40))
    whole = prefix_ids(key, 4, 7)
    assert len(set(whole)) == 10
    assert whole[6:] == prefix_ids(key[24:], 4, whole[5])
    assert prefix_ids(key, 4, 8)[0] != whole[0]
    assert len(prefix_ids(key[:39], 4, 7)) == 9


def test_one_eighth_more_is_kept_for_a_while() -> None:
    ghosts = new_ghosts()
    for prefix in range(1, 10):
        ghosts.put(prefix, 0, 0, prefix, prefix)
    deque(ghosts.renew(8, 10))
    assert len(ghosts) == 9
    ghosts.put(10, 0, 0, 10, 10)
    deque(ghosts.renew(8, 11))
    assert sorted(ghosts.keys) == list(range(3, 11))

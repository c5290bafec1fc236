"""Priority under Headwater's policy: what goes first within a namespace, and that no other one gives up anything."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from headwater.cache.eviction import EVICTION
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.eviction.headwater.order import Candidates
from tests.cache.toy import LAYOUT, Toy, assert_only_its_own, dump, example, words

SMALL = replace(LAYOUT, n_pages=100, checkpoint_pages=1, slot_pages=0)


def toy_of(states: int, eviction: str = "headwater") -> Toy:
    """A cache in which `states` checkpoints fit."""
    return Toy(replace(SMALL, state_fraction=states / 100), eviction)


def kept_of(toy: Toy) -> Candidates:
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    return policy.candidates


def cached(toy: Toy, first: int, namespace: str = "") -> bool:
    return toy.match((*words(first, 8), 0), namespace).checkpoint_tokens == 8


@pytest.mark.parametrize(("priority", "gone"), [(1, 2), (0, 1), (-1, 1)])
def test_high_priority_outlives_newer_checkpoints(priority: int, gone: int) -> None:
    toy = toy_of(3)
    toy.serve(words(1, 8), priority=priority)
    for first in (2, 3, 4):
        toy.serve(words(first, 8))
    assert [cached(toy, first) for first in (1, 2, 3, 4)] == [first != gone for first in (1, 2, 3, 4)]


def test_low_priority_is_evicted_before_older_checkpoints() -> None:
    toy = toy_of(3)
    for first in (1, 2, 3, 4):
        toy.serve(words(first, 8), priority=-1 if first == 2 else 0)
    assert [cached(toy, first) for first in (1, 2, 3, 4)] == [True, False, True, True]


def test_high_priority_is_a_weight_not_a_promise() -> None:
    """At four times the age of the others high priority is worth as much as they are."""
    toy = toy_of(3)
    toy.serve(words(1, 8), priority=1)
    for first in range(2, 30):
        toy.serve(words(first, 8))
    assert not cached(toy, 1)


@pytest.mark.parametrize(("first", "second", "expected"), [(1, -1, 1), (1, 0, 1), (-1, 0, 0), (-1, -1, -1), (0, 1, 1)])
def test_shared_checkpoint_has_the_highest_priority_of_its_requests(first: int, second: int, expected: int) -> None:
    toy = toy_of(9)
    toy.serve(words(9, 8), priority=1)  # so that priorities are known
    toy.serve(words(1, 8), priority=first)
    toy.serve((*words(1, 8), *words(2, 8)), priority=second)
    kept = kept_of(toy)
    found = {node.end: kept.priority[row] for row, node in enumerate(kept.keys) if node.edge[:4] != words_key(9)}
    assert found == {2: expected, 4: second}


def words_key(first: int) -> bytes:
    return words(first, 1)[0].to_bytes(4, "little")


def test_checkpoint_saved_again_has_the_priority_of_its_request() -> None:
    toy = toy_of(1)
    toy.serve(words(1, 8), priority=1)
    toy.serve(words(2, 8))
    toy.serve(words(1, 8))
    assert kept_of(toy).priority.tolist() == [0]


@pytest.mark.parametrize("room", [Room.STATE, Room.KV])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_a_namespace_gives_up_no_checkpoint_for_the_priorities_of_another(seed: int, room: Room) -> None:
    """At any moment the next victim is of the namespace whose checkpoint would go without any priority."""
    rng = Random(seed)
    toy = toy_of(12)
    policy, differ = toy.cache.policy, 0
    for _ in range(200):
        namespace = rng.choice(("a", "b", "c"))
        priority = rng.choice((1, -1, 0)) if namespace == "a" else 0
        toy.serve(
            (*words(rng.randrange(12), 8), *words(50 + rng.randrange(50), 4)), (8, 12), namespace, priority=priority
        )
        kept, known = kept_of(toy), kept_of(toy)._preferred
        roots = zip(kept.root, kept.priority, strict=True)
        assert known == Counter(root for root, priority in roots if priority), "those that were evicted are not counted"
        victim = policy.victim(room, toy.cache.now)
        kept._preferred = Counter()
        without = policy.victim(room, toy.cache.now)
        kept._preferred = known
        assert_only_its_own(toy.cache, victim, without, "a")
        differ += victim != without
    assert differ or room is Room.KV  # there KV without a checkpoint goes first


@pytest.mark.parametrize("name", sorted(set(EVICTION) - {"headwater", "clairvoyant"}))
def test_other_policies_ignore_a_priority(name: str) -> None:
    dumps = []
    for priority in (0, 1):
        toy = toy_of(4, example(name, EVICTION[name]))
        for first in range(1, 9):
            toy.serve((*words(first % 3, 8), *words(first, 4)), (8, 12), priority=priority * (first % 2))
        dumps.append(dump(toy.cache))
    assert dumps[0] == dumps[1]

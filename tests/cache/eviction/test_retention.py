"""Retention by a time to live under Headwater's policy: what stays, until when, how much, and at whose expense."""

from dataclasses import replace
from random import Random

import pytest

from headwater.cache.eviction import EVICTION
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.node import Node
from headwater.errors import ConfigError
from headwater.plan import Retention
from tests.cache.toy import LAYOUT, Toy, assert_only_its_own, dump, evict, example, words

SMALL = replace(LAYOUT, n_pages=100, checkpoint_pages=1, slot_pages=0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(eviction: str = "headwater", states: int = 20) -> tuple[Toy, Clock]:
    """A cache with a clock, in which `states` checkpoints fit."""
    toy, clock = Toy(replace(SMALL, state_fraction=states / 100), eviction), Clock()
    toy.cache.policy.clock = clock
    return toy, clock


def retain(toy: Toy, first: int, seconds: float = 300.0, namespace: str = "", length: int = 8) -> None:
    toy.serve(words(first, length), namespace=namespace, retained=(Retention(length, seconds),))


def cached(toy: Toy, first: int, namespace: str = "") -> bool:
    return toy.match((*words(first, 8), 0), namespace).checkpoint_tokens == 8


def test_a_retained_checkpoint_outlives_later_ones_and_then_lets_go() -> None:
    toy, clock = timed(states=3)
    retain(toy, 1)
    for first in range(2, 9):
        toy.serve(words(first, 8))
    assert cached(toy, 1)
    clock.now = 300.0
    for first in range(9, 12):
        toy.serve(words(first, 8))
    assert not cached(toy, 1)


def test_each_use_that_asks_for_it_begins_the_time_again() -> None:
    toy, clock = timed(states=3)
    retain(toy, 1)
    clock.now = 200.0
    toy.serve((*words(1, 8), 0), retained=(Retention(8, 300.0),), checkpoints=())
    clock.now = 400.0
    for first in range(2, 9):
        toy.serve(words(first, 8))
    assert cached(toy, 1)


def test_a_shorter_time_does_not_shorten_a_longer_one() -> None:
    toy, clock = timed(states=3)
    retain(toy, 1, 3600.0)
    toy.serve((*words(1, 8), 0), retained=(Retention(8, 300.0),), checkpoints=())
    clock.now = 400.0
    for first in range(2, 9):
        toy.serve(words(first, 8))
    assert cached(toy, 1)


def test_an_ended_conversation_is_not_retained() -> None:
    toy, _ = timed(states=3)
    retain(toy, 1)
    toy.cache.end_conversation("", words_key(1))
    for first in (2, 3, 4):
        toy.serve(words(first, 8))
    assert not cached(toy, 1)
    assert all(cached(toy, first) for first in (2, 3, 4))


@pytest.mark.parametrize("leaves", [False, True])
def test_large_table_evicts_another_instead_of_a_retained_checkpoint(leaves: bool) -> None:
    """More than 128 checkpoints: the lowest are ranked beforehand, and KV goes from the leaves."""
    toy = Toy(replace(SMALL, n_pages=2000, state_fraction=0.15), "headwater(retained=1)")
    policy = toy.cache.policy
    policy.clock = Clock()
    for first in range(400):
        toy.serve((*words(first % 60, 8), *words(100 + first, 4)), (8, 12))
    assert len(policy.candidates.keys) > 128
    gone = set()
    for _ in range(40):
        victim = policy.candidates.lowest(toy.cache.now, leaves, policy.clock)
        assert victim not in gone
        assert not (leaves and victim.children)
        policy.retain(victim, 300.0)
        gone.add(victim)


def test_longer_of_two_retentions_on_one_page_counts() -> None:
    toy, clock = timed()
    toy.serve(words(1, 8), retained=(Retention(9, 3600.0), Retention(10, 300.0)))
    clock.now = 1000.0
    assert len(retained_by(toy)) == 1


def test_retained_checkpoint_is_evicted_if_its_namespace_has_no_other() -> None:
    toy, _ = timed(states=4)
    for first in (1, 2, 3, 4):
        retain(toy, first)
    toy.serve(words(5, 8), namespace="another")
    assert sum(cached(toy, first) for first in (1, 2, 3, 4)) == 3


def retained_by(toy: Toy, namespace: str = "") -> list[Node]:
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    nodes = [node for node in policy.candidates.keys if toy.cache.index.namespace(node) == namespace]
    return policy.candidates.retained(nodes[0], policy.clock()) if nodes else []


def pages(nodes: list[Node]) -> int:
    """Pages of checkpoints and of the KV before them."""
    path = {part for node in nodes for part in node.climb()}
    return len(nodes) + sum(len(part.pages) for part in path)


def test_retentions_of_a_namespace_take_at_most_their_share() -> None:
    """A quarter of 100 pages: of checkpoints with 3 pages each, 8; the first to lapse are dropped."""
    toy, clock = timed(states=40)
    for first in range(1, 13):
        clock.now += 1
        retain(toy, first, 3600.0 if first == 1 else 300.0)
        assert pages(retained_by(toy)) <= 25
    assert len(retained_by(toy)) == 8
    assert [node.edge for node in retained_by(toy)][-1] == toy.cache.index.find("", words_key(1))[0][0].edge
    retain(toy, 20, namespace="another")
    assert len(retained_by(toy)) == 8
    assert len(retained_by(toy, "another")) == 1


def words_key(first: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words(first, 8))


def test_a_prompt_larger_than_the_share_is_not_retained() -> None:
    toy, _ = timed("headwater(retained=0.05)")
    retain(toy, 1)
    retain(toy, 2, length=24)
    assert [node.end for node in retained_by(toy)] == [2]


@pytest.mark.parametrize("room", [Room.STATE, Room.KV])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_retention_costs_other_namespaces_no_checkpoint(seed: int, room: Room) -> None:
    """At any moment the next victim is of the namespace whose checkpoint would go without any retention."""
    rng = Random(seed)
    toy, clock = timed(states=12)
    policy = toy.cache.policy
    for _ in range(200):
        namespace = rng.choice(("a", "b", "c"))
        hints = (Retention(8, 300.0),) if namespace == "a" and rng.random() < 0.7 else ()
        toy.serve((*words(rng.randrange(12), 8), *words(50 + rng.randrange(50), 4)), (8, 12), namespace, retained=hints)
        clock.now += 1
        victim = policy.victim(room, toy.cache.now)
        policy.clock = lambda: 1e9  # when all retentions have lapsed
        without = policy.victim(room, toy.cache.now)
        policy.clock = clock
        assert_only_its_own(toy.cache, victim, without, "a")


def test_hints_are_accepted_after_all_checkpoints_were_evicted() -> None:
    toy, _ = timed(states=3)
    retain(toy, 1)
    while toy.cache.stats().checkpoints:
        evict(toy.cache, Room.STATE)
    for first in (2, 3):
        retain(toy, first)
    policy = toy.cache.policy
    assert isinstance(policy, Headwater)
    assert len(policy.candidates.until) == len(policy.candidates) == 2


@pytest.mark.parametrize("name", sorted(set(EVICTION) - {"headwater", "clairvoyant"}))
def test_other_policies_ignore_a_time_to_live(name: str) -> None:
    dumps = []
    for hints in ((), (Retention(8, 300.0),)):
        toy, _ = timed(example(name, EVICTION[name]), states=4)
        for first in range(1, 9):
            toy.serve((*words(first % 3, 8), *words(first, 4)), (8, 12), retained=hints)
        dumps.append(dump(toy.cache))
    assert dumps[0] == dumps[1]


def test_a_question_for_the_victim_changes_nothing() -> None:
    toy, _ = timed(states=3)
    for first in (1, 2, 3):
        retain(toy, first, namespace="a" if first < 3 else "b")
    before = dump(toy.cache)
    assert toy.cache.policy.victim(Room.STATE, 9) == toy.cache.policy.victim(Room.STATE, 9)
    assert dump(toy.cache) == before
    evict(toy.cache, Room.STATE)


def test_a_share_beyond_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="retained is 2, must be a share of the memory: 0 to 1"):
        Toy(SMALL, "headwater(retained=2)")

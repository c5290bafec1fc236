"""What every eviction policy promises. A new one is in it by being in the table."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headwater.cache.eviction import EVICTION, Eviction, Kind, Room, make_eviction
from headwater.errors import ConfigError
from tests.cache.toy import LAYOUT, PAGE, Toy, floor, words

OPTIONS = {"path_cap": "(2)", "last_n": "(3)"}  # of policies that cannot be made without
VARIANTS = ["lru(prefer_dead=False)", "seglen(w=0.2, single_child=False)"]
SPELLINGS = [*(name + OPTIONS.get(name, "") for name in sorted(EVICTION)), *VARIANTS]
policies = pytest.mark.parametrize("policy", SPELLINGS)
fractions = pytest.mark.parametrize("fraction", [None, 0.4])


def filled(policy: str, fraction: float | None, pages: int = 60) -> Toy:
    """A cache after a few hundred requests with shared prefixes; some are still running."""
    toy, rng = Toy(replace(LAYOUT, n_pages=pages, state_fraction=fraction), policy), random.Random(0)
    for round_ in range(150):
        prefix = words(rng.randint(1, 4), 4 * rng.randint(1, 4))
        toy.serve(prefix + words(100 + round_, rng.randint(1, 12)), checkpoints=(floor(len(prefix)),))
    return toy


@policies
def test_it_can_be_made_from_its_name(policy: str) -> None:
    made: Eviction = make_eviction(policy, LAYOUT)
    assert made.victim(Room.ANY, 1) is None


def test_an_unknown_one_is_a_config_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="eviction 'belady' is unknown; there are clairvoyant, flop_aware, gdsf, "):
        make_eviction("belady", LAYOUT)


@policies
@fractions
@pytest.mark.parametrize("room", list(Room))
def test_everything_unpinned_can_be_evicted_and_nothing_else(policy: str, fraction: float | None, room: Room) -> None:
    toy = filled(policy, fraction)
    kept = words(50, 12)
    draft = toy.draft(kept, 0, checkpoints=(12,))
    toy.commit(toy.reserve(draft), draft)
    cache = toy.cache
    while (victim := cache.policy.victim(room, cache._now)) is not None:
        node, kind = victim
        assert not node.holds
        assert kind is Kind.CHECKPOINT or not (node.pins or node.children)
        assert kind is not Kind.TAIL or node.checkpoint is None
        cache._evictor.evict(room, 1, cache._now)
        cache.check()
    stats = cache.stats()
    assert toy.match((*kept, 0)).checkpoint_tokens == 12
    if room is not Room.STATE:
        assert stats.pages_kv == 3
    if room is not Room.KV:
        assert stats.checkpoints == 1


@policies
@fractions
def test_no_more_goes_than_is_needed(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction)
    for first in range(200, 220):
        before = toy.cache.stats()
        draft = toy.draft(words(first, 3 * PAGE), 0)
        toy.cache.abandon(toy.reserve(draft))
        toy.release(draft.request)
        after = toy.cache.stats()
        assert after.evicted_kv_pages - before.evicted_kv_pages <= 3
        if fraction is None:
            assert after.pages_free <= max(before.pages_free, 3 + LAYOUT.checkpoint_pages - 1)


@policies
def test_asking_for_a_victim_changes_nothing(policy: str) -> None:
    toy = filled(policy, None)
    cache = toy.cache
    first = cache.policy.victim(Room.ANY, cache._now)
    assert first is not None
    assert cache.policy.victim(Room.ANY, cache._now) == first


@policies
def test_speculative_checkpoints_go_before_other_checkpoints(policy: str) -> None:
    toy = Toy(replace(LAYOUT, n_pages=60, state_fraction=0.5), policy)
    toy.serve(words(1, 12))
    toy.serve(words(2, 12), checkpoints=(), speculative=(8,))
    toy.cache._evictor.evict(Room.STATE, 1, toy.cache._now)
    assert toy.match(words(2, 12)).checkpoint_tokens == 0
    assert toy.match((*words(1, 12), 0)).checkpoint_tokens == 12


@policies
@fractions
def test_what_fits_in_the_arena_is_served(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction, pages=30)
    for first in range(200, 240):
        draft = toy.draft(words(first, 18 * PAGE), 0, slot=True)
        plan = toy.reserve(draft)  # nothing is too much for it: no OutOfPages
        assert len(set(plan.table)) == 18
        toy.commit(plan, draft)
        toy.release(draft.request)

"""Two pools that trade memory in steps, on what the Alibaba article made them for: short chats, then long contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.errors import OutOfPages
from tests.cache.toy import LAYOUT, PAGE, Toy, words

SPLIT = replace(LAYOUT, n_pages=60, state_fraction=0.5)
ELASTIC = replace(SPLIT, elastic_pages=5)
LONG = words(90, 42 * PAGE)


def chats(toy: Toy, first: int, count: int) -> None:
    """Short requests that have nothing in common: 2 pages of KV and a checkpoint of 2 pages each."""
    for number in range(first, first + count):
        toy.serve(words(number, 2 * PAGE), slot=True)


def sizes(toy: Toy) -> tuple[int, int]:
    pool = toy.cache.pool
    assert pool.kv.size + pool.states.size == 60
    return pool.kv.size, pool.states.size


def test_elastic_pools_follow_short_chats_and_a_long_context() -> None:
    toy = Toy(ELASTIC)
    chats(toy, 1, 14)
    assert sizes(toy) == (30, 30)
    match = toy.serve(LONG, slot=True)
    assert match.checkpoint_tokens == 0
    assert sizes(toy) == (45, 15)
    assert toy.match((*LONG, 0)).checkpoint_tokens == 42 * PAGE
    chats(toy, 20, 14)
    assert toy.match((*words(33, 8), 0)).checkpoint_tokens == 8


def test_fixed_pools_refuse_the_same_long_context() -> None:
    toy = Toy(SPLIT)
    chats(toy, 1, 14)
    with pytest.raises(OutOfPages, match="42"):
        toy.serve(LONG, slot=True)


def test_free_pages_of_other_pool_are_used_before_eviction() -> None:
    rigid, elastic = Toy(SPLIT), Toy(ELASTIC)
    for toy in (rigid, elastic):
        toy.serve(words(1, 20 * PAGE))
        toy.serve(words(2, 20 * PAGE))
    assert rigid.cache.stats().evicted_kv_pages == 10
    assert elastic.cache.stats().evicted_kv_pages == 0
    assert sizes(elastic) == (40, 20)


def test_own_pool_evicts_before_the_other_one() -> None:
    toy = Toy(ELASTIC)
    chats(toy, 1, 14)  # 28 pages of KV and 28 of checkpoints: neither pool has a step to spare
    draft = toy.draft(words(50, 10 * PAGE), 0)
    toy.reserve(draft)
    assert sizes(toy) == (30, 30)
    assert toy.cache.stats().pages_kv == 20
    assert toy.cache.stats().checkpoints == 10


def test_other_pool_evicts_if_own_pool_has_nothing_left() -> None:
    toy = Toy(ELASTIC)
    running = toy.draft(words(40, 20 * PAGE), 0, slot=True)
    toy.commit(toy.reserve(running), running)
    other = toy.draft(words(41, 4 * PAGE), 0, slot=True, checkpoints=tuple(range(4, 17, 4)))
    toy.commit(toy.reserve(other), other)
    kept = replace(other, start=16, end=17, publish=16, checkpoints=(), slot=False, hold_checkpoint=False)
    toy.commit(toy.reserve(kept), kept)
    draft = toy.draft(words(42, 25 * PAGE), 0, checkpoints=(4, 8, 12))
    toy.reserve(draft)
    kv, states = sizes(toy)
    assert (kv, states) == (50, 10)
    assert toy.cache.stats().checkpoints == 0


def test_request_beyond_both_pools_is_refused_without_change() -> None:
    toy = Toy(ELASTIC)
    chats(toy, 1, 14)
    with pytest.raises(OutOfPages) as error:
        toy.reserve(toy.draft(words(50, 59 * PAGE), 0, slot=True))
    assert error.value.needed > error.value.free + error.value.evictable
    assert sizes(toy) == (30, 30)
    assert toy.cache.stats().evicted_kv_pages == 0


def test_states_of_running_requests_are_in_the_pool_of_states() -> None:
    toy = Toy(replace(ELASTIC, slot_pages=6))
    for number in range(1, 7):
        draft = toy.draft(words(number, 8), 0, slot=True)
        toy.commit(toy.reserve(draft), draft)
    assert sizes(toy) == (20, 40)
    assert toy.cache.stats().pages_slot == 36

"""LRU with two orders: checkpoints by where work resumed, KV by what was matched."""

from __future__ import annotations

from dataclasses import replace

from headwater.plan import CacheLayout
from tests.cache.toy import LAYOUT, PAGE, Toy, words

SPLIT = replace(LAYOUT, n_pages=60, checkpoint_pages=1, slot_pages=0, state_fraction=0.05)
A, B, C = words(1, 8), words(2, 8), words(3, 8)


def checkpoints(toy: Toy) -> set[int]:
    """First words of the prompts that have a checkpoint at their end."""
    return {word for word in range(1, 9) if toy.match((*words(word, 8), 0)).checkpoint_tokens == 8}


def test_least_recently_used_checkpoint_is_evicted() -> None:
    toy = Toy(SPLIT)
    for first in (1, 2, 3):
        toy.serve(words(first, 8))
    toy.serve((*A, 0), checkpoints=())
    toy.serve(words(4, 8))
    assert checkpoints(toy) == {1, 3, 4}


def test_a_hit_refreshes_only_the_checkpoint_that_it_used() -> None:
    toy = Toy(replace(SPLIT, state_fraction=3 / 60))
    toy.serve(A, checkpoints=(4, 8))
    toy.serve(B)
    toy.serve((*A, 0), checkpoints=())
    toy.serve(C)
    assert toy.match(A[:6]).checkpoint_tokens == 0
    assert checkpoints(toy) == {1, 2, 3}


def test_speculative_checkpoints_go_before_all_others() -> None:
    toy = Toy(SPLIT)
    toy.serve(A)
    toy.serve(B, checkpoints=(), speculative=(4,))
    toy.serve(C)
    toy.serve(words(4, 8))
    assert toy.match(B[:6]).checkpoint_tokens == 0
    assert checkpoints(toy) == {1, 3, 4}


def test_a_speculative_checkpoint_that_was_hit_is_as_good_as_any() -> None:
    toy = Toy(SPLIT)
    toy.serve(A)
    toy.serve(B, checkpoints=(), speculative=(4,))
    toy.serve(C)
    toy.serve(B[:6], checkpoints=())
    toy.serve(words(4, 8))
    assert toy.match(B[:6]).checkpoint_tokens == 4
    assert checkpoints(toy) == {3, 4}


def test_dead_kv_is_evicted_first_by_default() -> None:
    toy = Toy(replace(LAYOUT, n_pages=12, checkpoint_pages=1))
    toy.serve(A)
    toy.serve(B, checkpoints=())
    toy.serve(words(3, 8 * PAGE), checkpoints=())
    assert checkpoints(toy) == {1}
    assert toy.match((*B, 0)).kv_tokens == 4


def test_oldest_leaf_without_prefer_dead_loses_its_checkpoint_first() -> None:
    toy = Toy(replace(LAYOUT, n_pages=12, checkpoint_pages=1), "lru(prefer_dead=False)")
    toy.serve(A)
    toy.serve(B, checkpoints=())
    toy.serve(words(3, 8 * PAGE), checkpoints=())
    assert checkpoints(toy) == set()
    assert toy.match((*A, 0)).kv_tokens == 8
    toy.serve(words(4, PAGE), checkpoints=())
    assert toy.match((*A, 0)).kv_tokens == 4
    assert toy.match((*B, 0)).kv_tokens == 8


def test_a_leaf_is_trimmed_by_as_many_pages_as_are_needed() -> None:
    toy = Toy(CacheLayout(n_pages=20, page_size=PAGE, unit_tokens=PAGE, unit_bytes=16, slot_pages=0))
    toy.serve(words(1, 60), checkpoints=())
    toy.serve(words(2, 28), checkpoints=())
    assert toy.match(words(1, 61)).kv_tokens == 60 - 2 * PAGE


def test_kv_of_a_split_pool_is_evicted_leaf_to_root() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20, checkpoint_pages=1, state_fraction=0.5))
    toy.serve(A)
    toy.serve(A + B)
    toy.serve(words(3, 16))
    toy.serve((*A, 0), checkpoints=())
    toy.serve(words(4, 8 + 2 * PAGE))
    assert toy.match((*A, *B)).kv_tokens == 8
    assert toy.match(words(3, 17)).kv_tokens == 16

"""LRU eviction, and eviction by frequency."""

from dataclasses import replace

from headwater.cache.eviction.base.lazy_heap import Rank
from headwater.cache.eviction.base.policy import Room
from headwater.cache.eviction.gdsf import Gdsf
from headwater.plan import CacheLayout, PrefillFlops
from tests.cache.toy import LAYOUT, PAGE, Toy, evict, words

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


ONE = replace(LAYOUT, n_pages=10, checkpoint_pages=1, slot_pages=0)


def hit(toy: Toy, first: int, count: int = 8) -> int:
    """Serve the text that begins with `first`, without new checkpoints; return the position at which it resumes."""
    return toy.serve((*words(first, count), 0), checkpoints=()).checkpoint_tokens


def kept(toy: Toy, first: int, count: int = 8) -> bool:
    return toy.match((*words(first, count), 0)).checkpoint_tokens == count


def test_lfu_keeps_checkpoints_with_more_hits_at_any_age() -> None:
    toy = Toy(SPLIT, "lfu")
    for first in (1, 2, 3):
        toy.serve(words(first, 8))
    assert [hit(toy, first) for first in (1, 1, 2, 3)] == [8] * 4
    toy.serve(words(4, 8))
    assert [kept(toy, first) for first in (1, 2, 3, 4)] == [True, False, True, True]


def test_lfu_forgets_the_count_of_an_evicted_checkpoint() -> None:
    toy = Toy(SPLIT, "lfu")
    for first in (1, 2, 3):
        toy.serve(words(first, 8))
        hit(toy, first)
    toy.serve(words(4, 8))
    toy.serve(words(1, 8))
    assert [kept(toy, first) for first in (1, 2, 3, 4)] == [True, True, True, False]


def test_gdsf_keeps_checkpoints_that_save_more_for_their_size() -> None:
    toy = Toy(replace(ONE, n_pages=9, flops=PrefillFlops(1.0, 1.0)), "gdsf")
    toy.serve(words(1, 12))  # 12 + 144 FLOPs on 4 pages
    toy.serve(words(2, 8))  # 8 + 64 on 3, and used later
    toy.serve(words(3, 8))
    assert kept(toy, 1, 12)
    assert not kept(toy, 2)


def test_gdsf_ages_checkpoints_that_were_frequent() -> None:
    toy = Toy(ONE, "gdsf")
    toy.serve(words(1, 8))
    for _ in range(3):
        hit(toy, 1)  # H = 4 * 8/3; the others begin at L + 8/3, and every second one that goes raises L by 8/3
    for first in range(2, 10):
        toy.serve((*words(first, 8), 0))
        assert kept(toy, 1)
    for first in range(10, 13):
        toy.serve((*words(first, 8), 0))
    assert not kept(toy, 1)


def test_gdsf_values_a_checkpoint_over_the_one_above() -> None:
    toy = Toy(replace(SPLIT, state_fraction=4 / 60), "gdsf")
    toy.serve(words(1, 8))
    toy.serve(words(2, 24), checkpoints=(20, 24))  # the one at 24 saves 4 tokens over the one at 20
    toy.serve(words(3, 8))
    toy.serve(words(4, 8))
    assert toy.match((*words(2, 24), 0)).checkpoint_tokens == 20
    assert kept(toy, 1)


def test_gdsf_does_not_age_by_evictions_out_of_turn() -> None:
    """A speculative checkpoint goes first, whatever its H: L is the H of those that were the lowest."""
    toy = Toy(replace(SPLIT, n_pages=100, state_fraction=0.03), "gdsf")
    toy.serve(words(1, 8))
    toy.serve(words(2, 40), checkpoints=(), speculative=(40,))  # H = 40/11
    toy.serve(words(3, 8))
    for first in (4, 5):
        toy.serve(words(first, 8))  # H = L + 8/3: for the second one L is that of the first that went in its turn
    policy = toy.cache.policy
    assert isinstance(policy, Gdsf)
    assert policy._age == 8 / 3


def test_gdsf_counts_shared_kv_of_a_leaf_as_it_changes() -> None:
    toy = Toy(replace(SPLIT, n_pages=100, state_fraction=0.1), "gdsf")
    toy.serve((*words(1, 80), *words(2, 8)))
    policy = toy.cache.policy
    assert isinstance(policy, Gdsf)
    alone = ranks(policy)
    toy.serve((*words(1, 80), *words(3, 8)), checkpoints=())
    assert ranks(policy) > alone
    for _ in range(2):
        evict(toy.cache, Room.KV)
    assert ranks(policy) == alone


def ranks(policy: Gdsf) -> list[Rank]:
    return sorted(policy._checkpoints._keys.values())

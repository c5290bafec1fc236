"""Statistics of the cache: pages by owner and by kind, and dead KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cache.toy import LAYOUT, PAGE, Toy, words


def test_kv_is_dead_once_no_checkpoint_stands_at_it_or_below() -> None:
    toy = Toy()
    toy.serve(words(1, 16))  # KV to 16, a checkpoint there
    assert toy.cache.stats().dead_kv_tokens == 0
    toy.serve(words(1, 8) + words(2, 8), checkpoints=())  # a branch without one
    assert toy.cache.stats().dead_kv_tokens == 8
    index = toy.cache.index
    kept = next(node for node in index if node.checkpoint is not None)
    toy.cache.pool.states.give(index.drop(kept))
    assert toy.cache.stats().dead_kv_tokens == 24
    toy.serve(words(1, 8) + words(2, 8))
    assert toy.cache.stats().dead_kv_tokens == 8
    toy.cache.check()


def test_without_recurrent_layers_nothing_is_dead() -> None:
    toy = Toy(replace(LAYOUT, checkpoint_pages=0, slot_pages=0, resumable="every_page"))
    toy.serve(words(1, 16))
    assert toy.cache.stats().dead_kv_tokens == 0


def test_checkpoints_are_counted_as_stored_resumed_and_evicted_by_kind() -> None:
    toy = Toy(replace(LAYOUT, n_pages=14))
    toy.serve(words(1, 16), speculative=(8,))
    stats = toy.cache.stats()
    assert (stats.saved_checkpoints, stats.saved_speculative, stats.checkpoints) == (2, 1, 2)
    toy.serve(words(1, 16) + words(2, 4))
    stats = toy.cache.stats()
    assert (stats.resumes, stats.resumed_tokens) == (1, 16)
    toy.serve(words(3, 40))  # needs all but two pages
    stats = toy.cache.stats()
    assert stats.evicted_speculative == 1
    assert stats.evicted_checkpoints == 3
    assert stats.evicted_kv_pages == 3
    assert stats.pages_kv + stats.pages_checkpoint + stats.pages_free == stats.pages_total == 14


def test_pages_of_open_plans_and_slots_are_counted_apart() -> None:
    toy = Toy()
    draft = toy.draft(words(1, 18), 0, checkpoints=(16,), slot=True)
    plan = toy.reserve(draft)
    stats = toy.cache.stats()
    assert (stats.pages_private, stats.pages_slot) == (5 + 2, 2)
    toy.commit(plan, draft)
    stats = toy.cache.stats()
    assert (stats.pages_private, stats.pages_kv, stats.pages_checkpoint) == (1, 16 // PAGE, 2)


@pytest.mark.parametrize("wrong", ["dead_pages", "kv_pages", "checkpoints"])
def test_check_notices_a_counter_that_is_off(wrong: str) -> None:
    toy = Toy()
    toy.serve(words(1, 16))
    setattr(toy.cache.index, wrong, 17)
    with pytest.raises(AssertionError, match="17 counted"):
        toy.cache.check()

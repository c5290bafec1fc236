"""lru_path, path_cap and last_n: policies that look at whole paths."""

from dataclasses import replace

import pytest

from headwater.cache.eviction import make_eviction
from headwater.errors import ConfigError
from tests.cache.toy import LAYOUT, Toy, words

SMALL = replace(LAYOUT, checkpoint_pages=1, slot_pages=0)
A, B, C = words(1, 8), words(2, 8), words(3, 8)


def ends(toy: Toy) -> list[int]:
    """Depths in tokens of all checkpoints."""
    return sorted(node.end * 4 for node in toy.cache.index if node.checkpoint is not None)


def test_lru_path_refreshes_the_checkpoints_above_the_one_that_was_used() -> None:
    toy = Toy(replace(SMALL, n_pages=60, state_fraction=3 / 60), "lru_path")
    toy.serve(A, checkpoints=(4, 8))
    toy.serve(B)
    toy.serve((*A, 0), checkpoints=())
    toy.serve(C)
    assert toy.match((*B, 0)).checkpoint_tokens == 0
    assert toy.match(A[:6]).checkpoint_tokens == 4


def test_lru_path_takes_leaves_whole_and_keeps_checkpoints_above() -> None:
    toy = Toy(replace(SMALL, n_pages=12), "lru_path")
    toy.serve((*A, 0))
    toy.serve((*A, *B, 0))
    toy.serve((*C, 0))
    toy.serve((*words(4, 8), 0))
    match = toy.match((*A, *B, 0))
    assert (match.checkpoint_tokens, match.kv_tokens) == (8, 8)
    assert toy.cache.stats().evicted_kv_pages == 2


def test_lru_path_remembers_evicted_edges() -> None:
    toy = Toy(replace(SMALL, n_pages=8), "lru_path")
    toy.serve((*A, 0))
    toy.serve((*B, 0))
    toy.serve((*C, 0))
    assert toy.match((*A, 0)).kv_tokens == 0
    assert toy.match((*A, 0)).branch_tokens == 8


def test_path_cap_keeps_the_deepest_checkpoints_of_a_path() -> None:
    toy = Toy(SMALL, "path_cap(2)")
    for end in (8, 16, 24, 32):
        toy.serve(words(1, end))
        assert ends(toy) == [at for at in (8, 16, 24, 32) if end - 16 <= at <= end]


def test_path_cap_keeps_branch_points_and_does_not_count_them() -> None:
    toy = Toy(SMALL, "path_cap(1)")
    toy.serve(words(1, 8))
    toy.serve(words(1, 8) + words(2, 8))
    toy.serve(words(1, 8) + words(3, 8))
    for end in (16, 24, 32):
        toy.serve(words(1, 8) + words(2, end))
    assert ends(toy) == [8, 16, 32, 40]


def test_path_cap_keeps_checkpoints_of_running_requests() -> None:
    toy = Toy(SMALL, "path_cap(0)")
    toy.serve(A)
    draft = toy.draft((*A, 0), 8)
    plan = toy.reserve(draft)
    toy.serve((*A, *B))
    assert ends(toy) == [8, 16]
    toy.commit(plan, draft)
    toy.release(draft.request)
    toy.serve((*A, *B, *C))
    assert ends(toy) == [24]


def test_last_n_keeps_that_many_paths_with_all_their_checkpoints() -> None:
    toy = Toy(SMALL, "last_n(2)")
    for first in range(1, 6):
        toy.serve(words(first, 12), checkpoints=(4, 8))
    assert [toy.match(words(first, 12)).checkpoint_tokens for first in range(1, 6)] == [0, 0, 0, 8, 8]
    assert toy.cache.stats().pages_kv == 6


def test_last_n_counts_a_session_once_and_requests_on_one_document_apart() -> None:
    toy = Toy(SMALL, "last_n(3)")
    toy.serve(words(9, 8))
    for end in (8, 16, 24):
        toy.serve(words(1, end))
    document = words(2, 8)
    toy.serve((*document, *words(3, 8)), checkpoints=(8, 16))
    assert [toy.match((*words(first, 8), 0)).checkpoint_tokens for first in (9, 1, 2)] == [8, 8, 8]
    toy.serve((*document, *words(4, 8)))
    assert [toy.match((*words(first, 8), 0)).checkpoint_tokens for first in (9, 1, 2)] == [0, 8, 8]


def test_last_n_keeps_nodes_that_a_later_entry_shares() -> None:
    toy = Toy(SMALL, "last_n(1)")
    toy.serve((*A, *B), checkpoints=(8, 16))
    toy.serve((*A, *C))
    assert toy.match((*A, 0)).checkpoint_tokens == 8
    assert toy.match((*A, *B, 0)).kv_tokens == 8


def test_last_n_waits_for_a_running_request() -> None:
    toy = Toy(SMALL, "last_n(1)")
    toy.serve(A)
    draft = toy.draft((*A, 0), 8)
    plan = toy.reserve(draft)
    toy.serve(B)
    toy.commit(plan, draft)
    toy.release(draft.request)
    assert toy.match((*A, 0)).checkpoint_tokens == 8
    toy.serve(C)
    assert toy.cache.stats().pages_kv == 2


@pytest.mark.parametrize("spelling", ["path_cap", "path_cap(-1)", "last_n", "last_n(0)"])
def test_cap_without_a_number_is_refused(spelling: str) -> None:
    with pytest.raises(ConfigError):
        make_eviction(spelling, SMALL)

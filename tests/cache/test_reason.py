"""Every miss has a stated reason, and it is the true one."""

from dataclasses import replace

from headwater.account import Reason
from tests.cache.toy import LAYOUT, Toy, changed, words

A, B = words(1, 40), words(2, 40)


def test_reason_is_cold_for_a_new_prompt() -> None:
    toy = Toy()
    assert toy.match(A).reason is Reason.COLD
    toy.serve(B)
    assert toy.match(A).reason is Reason.COLD


def test_reason_is_other_namespace_if_only_this_one_is_empty() -> None:
    toy = Toy()
    toy.serve(A, namespace="alice")
    assert toy.match(B, "bob").reason is Reason.OTHER_NAMESPACE
    toy.serve(B, namespace="bob")
    assert toy.match(A, "bob").reason is Reason.COLD


def test_reason_of_one_salt_reveals_nothing_of_another() -> None:
    toy = Toy()
    toy.serve(A, namespace="alice")
    same, different = toy.match(A, "bob"), toy.match(B, "bob")
    assert same == different
    assert same.kv_tokens == 0


def test_reason_is_full_if_all_but_the_last_page_is_cached() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(36, 40))
    assert toy.match(A).reason is Reason.FULL


def test_reason_is_diverged_at_the_branch_point() -> None:
    toy = Toy()
    toy.serve(A)
    match = toy.match(A + B)
    assert (match.checkpoint_tokens, match.reason) == (40, Reason.DIVERGED)


def test_kv_beyond_the_checkpoint_has_reason_no_checkpoint() -> None:
    toy = Toy()
    toy.serve(A)
    assert toy.match(A[:30]).reason is Reason.NO_CHECKPOINT


def test_reason_is_too_short_without_a_page_before_the_last_token() -> None:
    toy = Toy()
    toy.serve(A)
    assert toy.match(A[:4]).reason is Reason.TOO_SHORT
    assert toy.match(()).reason is Reason.TOO_SHORT


def test_reason_is_evicted_if_only_the_checkpoint_was_evicted() -> None:
    toy = Toy(replace(LAYOUT, n_pages=16))
    toy.serve(A, checkpoints=(20, 40))
    toy.reserve(toy.draft(B[:16], 0))
    assert toy.match(A[:30]).reason is Reason.EVICTED
    assert toy.match(A[:20]).reason is Reason.NO_CHECKPOINT


def test_reason_is_evicted_after_the_whole_namespace_was_evicted() -> None:
    toy = Toy(replace(LAYOUT, n_pages=12))
    toy.serve(A, namespace="alice")
    toy.serve(B, namespace="bob")
    match = toy.match(A, "alice")
    assert (match.kv_tokens, match.reason) == (0, Reason.EVICTED)
    assert toy.match(words(3, 40), "alice").reason is Reason.OTHER_NAMESPACE


def test_reason_is_not_evicted_once_the_checkpoint_is_back() -> None:
    toy = Toy(replace(LAYOUT, n_pages=16))
    toy.serve(A, checkpoints=(20, 40))
    held = toy.draft(B[:16], 0)
    toy.commit(toy.reserve(held), held)
    toy.release(held.request)
    toy.serve(A[:30], checkpoints=(20,))
    assert toy.match(A[:25]).checkpoint_tokens == 20
    assert toy.match(A[:30]).reason is Reason.NO_CHECKPOINT


def test_reason_of_replaced_rolling_checkpoint_is_not_evicted() -> None:
    toy = Toy(replace(LAYOUT, n_pages=16))
    toy.serve(A, checkpoints=(20, 40))
    held = toy.draft(B[:16], 0)
    toy.commit(toy.reserve(held), held)
    toy.release(held.request)
    assert toy.match(A[:30]).reason is Reason.EVICTED
    first = toy.draft(A[:20], 0, checkpoints=(20,))
    toy.commit(toy.reserve(first), first)
    second = changed(first, start=20, end=24, publish=24, key=toy.draft(A, 0).key, checkpoints=(24,), replaces=20)
    toy.commit(toy.reserve(second), second)
    assert toy.match(A[:23]).reason is Reason.NO_CHECKPOINT

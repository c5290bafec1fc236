"""Promises of the cache about legs, pages and checkpoints; each test is named after its promise."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.account import Reason
from headwater.cache import NoCache
from headwater.errors import OutOfPages, PlanClosed, StaleMatch
from headwater.plan import Place
from tests.cache.toy import LAYOUT, PAGE, Toy, changed, dump, floor, key_of, words

A, B = words(1, 40), words(2, 40)


def test_request_matches_committed_prefix_of_another() -> None:
    toy = Toy()
    toy.serve(A)
    match = toy.match(A + words(3, 10))
    assert (match.kv_tokens, match.checkpoint_tokens, match.stranded_tokens) == (40, 40, 0)


def test_the_last_token_is_never_matched() -> None:
    toy = Toy()
    toy.serve(A)
    assert toy.match(A).kv_tokens == 36
    assert toy.match(A[:37]).kv_tokens == 36
    assert toy.match(A[:36]).kv_tokens == 32


def test_a_match_changes_nothing() -> None:
    toy = Toy()
    toy.serve(A)
    before = dump(toy.cache)
    assert toy.match(A[:22] + B) == toy.match(A[:22] + B)
    toy.match(A, "another")
    assert dump(toy.cache) == before


def test_plan_restores_the_checkpoint_and_shares_matched_pages() -> None:
    toy = Toy()
    toy.serve(A)
    draft = toy.draft(A + B, 40)
    plan = toy.reserve(draft)
    assert len(plan.restore) == LAYOUT.checkpoint_pages
    assert len(plan.table) == 20
    assert plan.write_from == 10
    toy.commit(plan, draft)


def test_kv_without_a_checkpoint_is_stranded_and_allocated_only_once() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(16,))
    match = toy.match(A[:32] + B)
    assert (match.kv_tokens, match.checkpoint_tokens, match.stranded_tokens) == (32, 16, 16)
    free = toy.cache.stats().pages_free
    draft = toy.draft(A[:32] + B[:8], 16)
    plan = toy.reserve(draft)
    assert plan.write_from == 8
    assert toy.cache.stats().pages_free == free - 2
    toy.commit(plan, draft)


def test_stranded_kv_is_named_by_later_legs_too() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=())
    free = toy.cache.stats().pages_free
    first = toy.draft(A, 0, end=8, publish=8)
    toy.commit(toy.reserve(first), first)
    second = changed(first, start=8, end=40, publish=40)
    plan = toy.reserve(second)
    assert plan.write_from == 10
    assert toy.cache.stats().pages_free == free
    toy.commit(plan, second)
    toy.release(first.request)


def test_kv_beyond_a_private_page_is_not_shared() -> None:
    toy = Toy()
    first = toy.draft(A, 0, end=10, publish=8)
    toy.commit(toy.reserve(first), first)
    toy.serve(A, checkpoints=())
    second = changed(first, start=10, end=40, publish=40)
    plan = toy.reserve(second)
    assert plan.write_from == 2
    toy.commit(plan, second)
    toy.release(first.request)


def test_stranded_kv_stays_while_a_lease_names_it() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20))
    toy.serve(A, checkpoints=())
    draft = toy.draft(A, 0, end=8, publish=8)
    first = toy.reserve(changed(draft, end=40, publish=40))
    with pytest.raises(OutOfPages):
        toy.reserve(toy.draft(words(3, 44), 0))
    toy.cache.abandon(first)
    toy.release(draft.request)
    toy.reserve(toy.draft(words(3, 44), 0))


def test_existing_checkpoint_needs_no_pages() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(20, 40))
    match = toy.match(A[:36])
    plan = toy.reserve(toy.draft(A[:36], 0, checkpoints=(20, 28)))
    assert match.checkpoint_tokens == 20
    assert [save.position for save in plan.saves] == [28]


def test_checkpoints_become_the_ends_of_nodes_at_commit() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(8, 20))
    assert sorted(node.end * PAGE for node in toy.cache.index) == [8, 20, 40]


def test_first_speculative_checkpoints_use_the_free_pages() -> None:
    toy = Toy(replace(LAYOUT, n_pages=15))
    plan = toy.reserve(toy.draft(A, 0, speculative=(8, 16, 24, 32)))
    assert [save.position for save in plan.saves] == [8, 16]


def test_speculative_checkpoints_never_evict() -> None:
    toy = Toy(replace(LAYOUT, n_pages=24))
    toy.serve(A)
    plan = toy.reserve(toy.draft(B, 0, speculative=(8, 16)))
    assert [save.position for save in plan.saves] == [8]
    assert toy.cache.stats().evicted_checkpoints == 0


def test_duplicates_stay_the_requests_own_until_it_ends() -> None:
    toy = Toy()
    drafts = [toy.draft(A, 0, checkpoints=(40,)) for _ in range(2)]
    plans = [toy.reserve(draft) for draft in drafts]
    for plan, draft in zip(plans, drafts, strict=True):
        toy.commit(plan, draft)
    stats = toy.cache.stats()
    assert (stats.pages_kv, stats.pages_private, stats.checkpoints) == (10, 10, 1)
    toy.release(drafts[1].request)
    stats = toy.cache.stats()
    assert (stats.pages_kv, stats.pages_private) == (10, 0)


def test_leaf_without_checkpoint_is_extended_in_place() -> None:
    toy = Toy()
    draft, other = toy.draft(A, 0), toy.draft(A[:20], 0)
    plan = toy.reserve(draft)
    toy.commit(toy.reserve(other), other)
    toy.release(other.request)
    toy.commit(plan, draft)
    assert toy.cache.stats().nodes == 1
    assert toy.cache.stats().pages_private == 5


def test_private_pages_of_decode_are_freed_at_release() -> None:
    toy = Toy()
    draft = toy.draft(A[:38], 0, checkpoints=(36,), slot=True)
    toy.commit(toy.reserve(draft), draft)
    decode = changed(draft, start=38, end=47, checkpoints=(), publish=0)
    plan = toy.reserve(decode)
    assert (len(plan.table), plan.write_from, plan.saves) == (12, 9, ())
    toy.commit(plan, decode)
    assert toy.cache.stats().pages_kv == 9
    toy.release(draft.request)
    stats = toy.cache.stats()
    assert (stats.pages_private, stats.pages_slot, stats.pages_free) == (0, 0, 200 - 9 - 2)


def test_a_rolling_checkpoint_replaces_the_one_before() -> None:
    toy = Toy()
    first = toy.draft(A, 0, end=20, publish=20, checkpoints=(20,))
    toy.commit(toy.reserve(first), first)
    second = changed(first, start=20, end=40, publish=40, checkpoints=(40,), replaces=20)
    toy.commit(toy.reserve(second), second)
    assert [node.end * PAGE for node in toy.cache.index if node.checkpoint is not None] == [40]
    assert toy.cache.stats().evicted_checkpoints == 0


def test_rolling_checkpoint_at_branch_point_or_pin_is_kept() -> None:
    toy = Toy()
    first = toy.draft(A, 0, end=20, publish=20, checkpoints=(20,))
    toy.commit(toy.reserve(first), first)
    other = toy.draft(A[:20] + B, 20)
    toy.commit(toy.reserve(other), other)
    second = changed(first, start=20, end=40, publish=40, checkpoints=(40,), replaces=20)
    toy.commit(toy.reserve(second), second)
    assert toy.match(A[:24]).checkpoint_tokens == 20


def test_guessed_checkpoint_that_another_request_saves_is_confirmed() -> None:
    toy = Toy()
    guess, asked = toy.draft(A, 0, speculative=(8,)), toy.draft(A, 0, checkpoints=(8,))
    plans = toy.reserve(guess), toy.reserve(asked)
    toy.commit(plans[0], guess)
    toy.commit(plans[1], asked)
    assert [node.speculative for node in toy.cache.index if node.checkpoint is not None] == [False]


def test_rolling_checkpoint_with_a_hit_is_kept() -> None:
    toy = Toy()
    first = toy.draft(A, 0, end=20, publish=20, checkpoints=(20,))
    toy.commit(toy.reserve(first), first)
    other = toy.draft(A[:24], 20, publish=20, checkpoints=())
    toy.commit(toy.reserve(other), other)
    toy.release(other.request)
    second = changed(first, start=20, end=40, publish=40, checkpoints=(40,), replaces=20)
    toy.commit(toy.reserve(second), second)
    assert toy.match(A[:24]).checkpoint_tokens == 20


def test_abandon_loses_the_open_leg_only() -> None:
    toy = Toy()
    draft = toy.draft(A, 0, end=20, publish=20, checkpoints=(20,), slot=True)
    toy.commit(toy.reserve(draft), draft)
    before = toy.cache.stats()
    later = changed(draft, start=20, end=40, publish=40, checkpoints=(40,))
    plan = toy.reserve(later)
    toy.cache.abandon(plan)
    toy.cache.check()
    after = toy.cache.stats()
    assert (after.pages_free, after.pages_kv, after.pages_slot) == (before.pages_free, 5, LAYOUT.slot_pages)
    toy.commit(toy.reserve(later), later)
    assert toy.match(A).kv_tokens == 36


def test_cancelled_request_frees_all_its_pages() -> None:
    toy = Toy()
    draft = toy.draft(A, 0, checkpoints=(40,), speculative=(8,), slot=True)
    toy.cache.abandon(toy.reserve(draft))
    toy.release(draft.request)
    stats = toy.cache.stats()
    assert (stats.pages_free, stats.nodes, stats.namespaces, stats.leases) == (200, 0, 0, 0)


def test_a_plan_closes_once() -> None:
    toy = Toy()
    draft = toy.draft(A, 0)
    plan = toy.reserve(draft)
    toy.commit(plan, draft)
    before = dump(toy.cache)
    for close in (toy.cache.commit, toy.cache.abandon):
        with pytest.raises(PlanClosed, match=f"plan {plan.id} of request 1 is not open"):
            close(plan)
    assert dump(toy.cache) == before


def test_an_unknown_request_cannot_be_released() -> None:
    toy = Toy()
    with pytest.raises(KeyError):
        toy.cache.release(7)


def test_out_of_pages_changes_nothing_and_names_the_numbers() -> None:
    toy = Toy(replace(LAYOUT, n_pages=30))
    toy.serve(A)
    held = toy.draft(B[:20], 0, checkpoints=(20,))
    toy.commit(toy.reserve(held), held)
    before = dump(toy.cache)
    with pytest.raises(OutOfPages) as caught:
        toy.reserve(toy.draft(A[:20] + words(3, 80), 0, checkpoints=(100,), slot=True))
    assert dump(toy.cache) == before
    error = caught.value
    assert (error.needed, error.free, error.evictable) == (24, 11, 5 + 2)


@pytest.mark.parametrize("fraction", [None, 0.4])
def test_leg_that_fits_after_all_evictions_is_reserved(fraction: float | None) -> None:
    toy = Toy(replace(LAYOUT, n_pages=30, state_fraction=fraction))
    for first in range(1, 7):
        toy.serve(words(first, 28))
    kv = 18 if fraction else 28
    toy.reserve(toy.draft(words(9, kv * PAGE), 0, slot=True))
    assert toy.cache.stats().pages_kv + toy.cache.stats().pages_checkpoint == 0


def test_lease_without_checkpoint_protects_none() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20))
    toy.serve(A)
    held = toy.draft(B[:20], 0)
    toy.commit(toy.reserve(held), held)
    toy.reserve(toy.draft(words(3, 15 * PAGE), 0))
    assert toy.cache.stats().checkpoints == 0


def test_a_pinned_page_is_never_evicted() -> None:
    toy = Toy(replace(LAYOUT, n_pages=30))
    held = toy.draft(A, 0, checkpoints=(40,))
    plan = toy.reserve(held)
    toy.commit(plan, held)
    for first in range(3, 9):
        toy.serve(words(first, 36))
    assert toy.match(A + B).checkpoint_tokens == 40
    toy.run(replace(plan, write_from=10), held)


def test_checkpoint_not_held_is_evicted_without_its_kv() -> None:
    toy = Toy(replace(LAYOUT, n_pages=22))
    toy.serve(A)
    draft = toy.draft(A + B[:4], 40, hold_checkpoint=False)
    toy.commit(toy.reserve(draft), draft)
    other = toy.draft(words(3, 11 * PAGE), 0)
    toy.reserve(other)
    match = toy.match(A + B[:5])
    assert (match.kv_tokens, match.checkpoint_tokens, match.reason) == (44, 0, Reason.EVICTED)


def test_evicted_checkpoint_keeps_kv_that_a_deeper_one_needs() -> None:
    toy = Toy(replace(LAYOUT, n_pages=16))
    toy.serve(A, checkpoints=(20, 40))
    toy.reserve(toy.draft(B[:16], 0))
    match = toy.match(A + B)
    assert (match.kv_tokens, match.checkpoint_tokens) == (40, 40)
    assert toy.match(A[:30]).checkpoint_tokens == 0


def test_request_without_reuse_shares_and_publishes_nothing() -> None:
    toy = Toy()
    toy.serve(A)
    draft = toy.draft(A, 0, reuse=False)
    plan = toy.reserve(draft)
    assert (plan.write_from, plan.restore) == (0, ())
    toy.commit(plan, draft)
    assert (toy.cache.stats().pages_kv, toy.cache.stats().pages_private) == (10, 10)


def test_smallest_arena_serves_requests_one_after_the_other() -> None:
    toy, served = Toy(replace(LAYOUT, n_pages=12)), 0
    for round_ in range(40):
        tokens = words(round_ % 3, 40 if round_ % 2 else 23)
        match = toy.match(tokens)
        for reuse, hold in ((True, True), (True, False), (False, False)):
            start = match.checkpoint_tokens if reuse else 0
            draft = toy.draft(tokens, start, slot=True, reuse=reuse, hold_checkpoint=hold)
            try:
                plan = toy.reserve(draft)
            except OutOfPages:
                continue
            toy.commit(plan, draft)
            toy.release(draft.request)
            served += 1
            break
        assert served == round_ + 1


def test_draft_that_does_not_follow_is_refused_without_change() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(20,))
    draft = toy.draft(A, 20, end=28, publish=28)
    toy.commit(toy.reserve(draft), draft)
    before = dump(toy.cache)
    for wrong, message in (
        (changed(draft, start=20, end=40), "the one before ended at 28"),
        (toy.draft(A, 24), "where no checkpoint is"),
        (toy.draft(B, 20), "cached are 0 tokens"),
        (toy.draft(B, 0, checkpoints=(6,)), "not on the grid"),
        (toy.draft(B, 0, checkpoints=(44,)), "not on the grid"),
        (toy.draft(B, 0, publish=44), "exceeds end 40"),
    ):
        with pytest.raises(ValueError, match=message):
            toy.cache.reserve(wrong)
    assert dump(toy.cache) == before


def test_a_model_without_attention_has_no_pages_of_kv() -> None:
    toy = Toy(replace(LAYOUT, n_pages=8, kv_pages_per_unit=0))
    toy.serve(A)
    draft = toy.draft(A + B, 40, checkpoints=(80,))
    plan = toy.reserve(draft)
    assert (len(plan.table), len(plan.restore)) == (0, 2)
    toy.commit(plan, draft)
    toy.release(draft.request)
    toy.serve(words(3, 40))
    toy.serve(words(4, 40))
    toy.serve(words(5, 40))
    stats = toy.cache.stats()
    assert (stats.pages_kv, stats.checkpoints, stats.nodes) == (0, 4, 4)
    assert toy.match(A + words(9, 4)).reason is Reason.EVICTED


def test_a_model_without_recurrent_layers_resumes_at_every_page() -> None:
    toy = Toy(replace(LAYOUT, n_pages=20, checkpoint_pages=0, slot_pages=0, resumable="every_page"))
    toy.serve(A, checkpoints=())
    match = toy.match(A[:22] + B)
    assert (match.kv_tokens, match.checkpoint_tokens, match.reason) == (20, 20, Reason.DIVERGED)
    toy.serve(A[:22] + B, checkpoints=())
    assert toy.cache.stats().dead_kv_tokens == 0
    assert toy.match(A[:22] + B).reason is Reason.FULL


def test_units_of_several_pages() -> None:
    layout = replace(LAYOUT, unit_tokens=4 * PAGE, unit_bytes=8)
    toy = Toy(layout)
    key, other = b"block--0block--1block--2", b"block--0block--Xblock--2"
    draft = changed(toy.draft((), 0), key=key, end=48, checkpoints=(32,), publish=48)
    plan = toy.cache.reserve(draft)
    assert len(plan.table) == 12
    toy.cache.commit(plan)
    toy.cache.check()
    assert toy.cache.match(key, 48).checkpoint_tokens == 32
    assert toy.cache.match(other, 49).kv_tokens == 16
    assert toy.cache.stats().pages_kv == 12


def test_no_cache_finds_nothing_and_publishes_nothing() -> None:
    cache = NoCache(LAYOUT)
    toy = Toy()
    for _ in range(2):
        assert cache.match(key_of(A), 40).reason is Reason.CACHE_OFF
        draft = toy.draft(A, 0, checkpoints=(40,), slot=True)
        plan = cache.reserve(draft)
        assert (len(plan.table), plan.saves) == (10, ())
        cache.commit(plan)
        cache.check()
        cache.release(draft.request)
        assert cache.stats().pages_free == LAYOUT.n_pages


def test_stats_add_up_to_all_pages() -> None:
    toy = Toy()
    toy.serve(A, checkpoints=(20,))
    draft = toy.draft(A[:30] + B, 20, checkpoints=(floor(70),), slot=True)
    toy.reserve(draft)
    s = toy.cache.stats()
    parts = s.pages_free + s.pages_kv + s.pages_checkpoint + s.pages_private + s.pages_slot
    assert parts == s.pages_total == 200
    assert (s.pages_kv, s.pages_checkpoint, s.pages_slot, s.checkpoints, s.open_plans) == (10, 2, 2, 1, 1)
    assert s.dead_kv_tokens == 20


def test_match_older_than_the_index_is_refused_without_change() -> None:
    toy = Toy()
    toy.serve(A)
    stale = toy.match(A + B)
    toy.serve(B)
    draft, before = toy.draft(A + B, stale.checkpoint_tokens), dump(toy.cache)
    with pytest.raises(StaleMatch, match="of version"):
        toy.cache.reserve(draft, stale)
    assert dump(toy.cache) == before
    fresh = toy.match(A + B)
    assert (fresh, fresh.version > stale.version) == (stale, True), "equal but for the version"
    toy.commit(toy.cache.reserve(draft, fresh), draft)


def test_lookups_pins_and_recency_leave_a_match_fresh() -> None:
    toy = Toy()
    toy.serve(A)
    match = toy.match(A + B)
    toy.match(B)
    node = toy.cache.index.roots[""].children[key_of(A)[: 4 * PAGE]]
    toy.cache.index.pin(node, hold=True)
    toy.cache.index.touch(node, None, toy.cache.now)
    toy.cache.index.unpin(node, hold=True)
    assert match.version == toy.cache.version


def test_walk_from_match_of_shared_prefix_finds_the_same() -> None:
    toy = Toy()
    toy.serve(A + B, checkpoints=(20, 60, 80))
    toy.serve(A[:24] + B)
    near = toy.match(A + B)
    for tokens, shared in ((A[:24] + B, 24), (A[:24] + B, 3), (A + B[:8], 48), (B, 0)):
        found = toy.cache.match(key_of(tokens), len(tokens), near=(near, shared))
        assert found == toy.match(tokens)
        assert toy.cache.path(found) == toy.cache.path(toy.match(tokens))


def test_walk_from_match_inside_an_edge_ends_there() -> None:
    """The edge of A has a checkpoint at its end: no other prompt that shares its first pages may resume there."""
    toy = Toy()
    toy.serve(A)
    other = A[:8] + B + B
    near = toy.match(other)
    assert (near.kv_tokens, near.checkpoint_tokens) == (8, 0)
    marked = other[:60] + words(9, 20)
    assert toy.cache.match(key_of(marked), len(marked), near=(near, 60)) == near


PAGES = st.lists(st.sampled_from("ab"), min_size=1, max_size=12).map(
    lambda kinds: tuple(token for kind in kinds for token in words("ab".index(kind) + 1, PAGE))
)


@given(st.lists(PAGES, max_size=5), PAGES, PAGES)
def test_walk_from_any_match_equals_walk_from_the_root(served, first, second) -> None:
    toy = Toy()
    for prompt in served:
        toy.serve(prompt)
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first[: len(second)]))
    found = toy.cache.match(key_of(second), len(second), near=(toy.match(first), shared))
    assert found == toy.match(second)
    assert toy.cache.path(found) == toy.cache.path(toy.match(second))


def test_evicting_outside_of_reserve_raises() -> None:
    toy = Toy(replace(LAYOUT, n_pages=40))
    toy.serve(A)
    place = Place("", key_of(B), 0)
    with pytest.raises(RuntimeError, match="outside of reserve"):
        toy.cache.evictor.make_rooms(40, 0, toy.cache.now)
    with pytest.raises(RuntimeError, match="outside of reserve"):
        toy.cache.branches.make_room_below(30, 0, place, place)
    toy.cache.check()

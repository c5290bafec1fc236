"""Tails: requests that resume in mid-page."""

from dataclasses import replace

import pytest

from headwater.cache.eviction.base.policy import Room
from headwater.plan import CacheLayout, Match
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, evict, floor, key_of, words

TAILS = replace(LAYOUT, tail_pages=(1, 1, 2, 2, 3))
EVERY_PAGE = replace(TAILS, checkpoint_pages=0, slot_pages=0, resumable="every_page", tail_pages=(1,) * (PAGE + 1))


def serve(toy: Toy, tokens: Tokens, inner: tuple[int, ...] = (), namespace: str = "", counts: bool = True) -> Match:
    """One request that resumes as deep as it can, with a checkpoint at its last page boundary and a tail at its end."""
    match = toy.match(tokens, namespace)
    last = (len(tokens) - 1) // PAGE * PAGE
    draft = toy.draft(
        tokens,
        match.resumed_tokens,
        namespace=namespace,
        kept=match.tail_tokens or None,
        checkpoints=tuple(at for at in {last, *map(floor, inner)} if at > match.resumed_tokens),
        tails=(*inner, len(tokens)),
        ends=True,
        counts=counts,
    )
    plan = toy.cache.reserve(draft, match)
    toy.cache.check()
    toy.commit(plan, draft)
    toy.release(draft.request)
    return match


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 11])
@pytest.mark.parametrize("layout", [TAILS, EVERY_PAGE], ids=["checkpoints", "every page"])
def test_identical_prompt_is_found_whole(layout: CacheLayout, length: int) -> None:
    toy = Toy(layout)
    assert serve(toy, words(1, length)).resumed_tokens == 0
    assert serve(toy, words(1, length)).resumed_tokens == length


@pytest.mark.parametrize("layout", [TAILS, EVERY_PAGE], ids=["checkpoints", "every page"])
def test_longer_prompt_resumes_after_the_last_token_of_a_shorter_one(layout: CacheLayout) -> None:
    toy = Toy(layout)
    serve(toy, words(1, 10))
    assert serve(toy, words(1, 10) + words(2, 9)).resumed_tokens == 10
    assert serve(toy, words(1, 10) + words(2, 9) + words(3, 1)).resumed_tokens == 19


@pytest.mark.parametrize("layout", [TAILS, EVERY_PAGE], ids=["checkpoints", "every page"])
def test_prompt_that_parts_within_a_tail_resumes_where_it_parts(layout: CacheLayout) -> None:
    toy = Toy(layout)
    serve(toy, words(1, 11))
    assert toy.match(words(1, 10) + words(2, 3)).resumed_tokens == 10
    assert toy.match(words(1, 9)).resumed_tokens == 8, "its last token is computed: no hidden row is cached after it"
    assert toy.match(words(1, 10)).resumed_tokens == 9


@pytest.mark.parametrize("at", range(9, 12))
def test_third_prompt_resumes_where_two_parted_in_mid_page(at: int) -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 20))
    second = toy.match(words(1, at) + words(2, 9))
    assert (second.kv_tokens, second.parted_tokens, second.resumed_tokens) == (8, at - 8, 0)
    serve(toy, words(1, at) + words(2, 9), inner=(at,))
    assert toy.match(words(1, at) + words(3, 9)).resumed_tokens == at


def test_prompt_that_parts_within_a_cached_page_resumes_there_without_recurrent_layers() -> None:
    toy = Toy(EVERY_PAGE)
    serve(toy, words(1, 20))
    serve(toy, words(1, 4) + words(2, 9))
    assert serve(toy, words(1, 10) + words(3, 9)).resumed_tokens == 10
    assert serve(toy, words(1, 4) + words(2, 2) + words(4, 9)).resumed_tokens == 6
    assert toy.match(words(1, 20)).resumed_tokens == 20


def test_cached_page_that_a_leg_reads_is_not_evicted() -> None:
    toy = Toy(replace(EVERY_PAGE, n_pages=8))
    serve(toy, words(1, 16))
    draft = toy.draft(words(1, 2) + words(2, 8), 2, kept=2)
    plan = toy.reserve(draft)
    assert plan.kept is not None
    toy.commit(plan, draft)


def test_two_tails_that_share_their_beginning_are_both_found() -> None:
    toy = Toy(TAILS)
    serve(toy, (*words(1, 10), 5))
    serve(toy, (*words(1, 10), 6))
    assert toy.match((*words(1, 10), 5, 9)).resumed_tokens == 11
    assert toy.match((*words(1, 10), 6, 9)).resumed_tokens == 11
    assert toy.match((*words(1, 10), 7, 9)).resumed_tokens == 10


def test_tails_of_one_namespace_are_not_found_in_another() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10), namespace="a")
    assert toy.match(words(1, 10), "b").resumed_tokens == 0
    assert toy.match(words(1, 3), "b").resumed_tokens == 0


def test_tail_is_evicted_before_its_checkpoint() -> None:
    toy = Toy(replace(TAILS, n_pages=12))
    serve(toy, words(1, 11))  # two pages of KV, two of a checkpoint, three of a tail
    draft = toy.draft(words(2, 16), 0, slot=True)
    toy.commit(toy.reserve(draft), draft)
    match = toy.match((*words(1, 11), 1))
    assert (match.checkpoint_tokens, match.tail_tokens) == (8, 0)
    assert toy.cache.stats().evicted_tails == 1


def test_evicted_checkpoint_takes_its_tails_along() -> None:
    toy = Toy(replace(TAILS, n_pages=16))
    serve(toy, words(1, 11))
    draft = toy.draft(words(2, 48), 0, slot=True)
    toy.commit(toy.reserve(draft), draft)
    assert toy.match(words(1, 11)).resumed_tokens == 0
    assert toy.cache.stats().tails == 0


def test_tail_that_a_leg_reads_is_not_evicted() -> None:
    toy = Toy(replace(TAILS, n_pages=16))
    serve(toy, words(1, 11))
    first = toy.draft(words(1, 12), 11, kept=3)
    plan = toy.reserve(first)
    second = toy.draft(words(2, 16), 0)
    toy.commit(toy.reserve(second), second)
    assert toy.cache.stats().tails == 1
    toy.commit(plan, first)


def test_ends_of_earlier_turns_are_evicted_before_any_other_tail() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10))
    serve(toy, words(1, 10) + words(2, 9))  # its answer's prefill, or the next turn
    serve(toy, words(7, 5))
    assert next(iter(toy.cache.tails)).ids == key_of(words(1, 10)[8:])


def test_end_that_is_sent_again_is_not_the_next_to_be_evicted() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10))
    serve(toy, words(7, 5))
    serve(toy, words(1, 10))
    assert next(iter(toy.cache.tails)).ids == key_of(words(7, 5)[4:])


def test_end_after_which_several_requests_resume_is_kept_as_others() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10))
    serve(toy, words(7, 5))
    for choice in (2, 3, 4):
        serve(toy, words(1, 10) + words(choice, 3))
    assert next(iter(toy.cache.tails)).ids == key_of(words(7, 5)[4:])


def test_tails_of_short_prompts_age_while_others_resume_at_the_root() -> None:
    toy = Toy(replace(TAILS, n_pages=21))
    serve(toy, words(1, 41))  # ten pages of KV, two of a checkpoint
    for prompt in range(2, 6):
        serve(toy, words(prompt, 3))  # a tail of three pages
    assert toy.match(words(1, 41)).checkpoint_tokens == 40


@pytest.mark.parametrize(
    ("checkpoints", "evictions", "is_stored"), [((), 0, True), ((40,), 0, False), ((40,), 6, False), ((40,), 7, True)]
)
def test_tail_that_saves_less_than_a_recent_victim_is_not_stored(
    checkpoints: tuple[int, ...], evictions: int, is_stored: bool
) -> None:
    toy = Toy(replace(TAILS, n_pages=16))
    toy.serve(words(1, 40), checkpoints)
    if checkpoints:
        evict(toy.cache, Room.STATE)  # it would have saved 40 FLOPs in 12 pages
    for prompt in range(evictions):
        toy.serve(words(10 + prompt, 4))
        evict(toy.cache, Room.STATE)  # 4 FLOPs in 3 pages; the price of a page falls by 2/16
    toy.serve(words(2, 24), ())
    serve(toy, words(3, 3))  # 3 tokens and a hidden row, 4 FLOPs, in 3 pages of KV that no checkpoint can use
    assert toy.cache.stats().tails == is_stored


@pytest.mark.parametrize(("n_pages", "is_stored"), [(6, False), (7, True)])
def test_tail_before_an_answer_leaves_room_for_a_checkpoint(n_pages: int, is_stored: bool) -> None:
    toy = Toy(replace(TAILS, n_pages=n_pages))
    draft = toy.draft(words(1, 3), 0, tails=(3,), ends=True, is_passed=True)
    toy.commit(toy.reserve(draft), draft)  # a page of KV, and three of the tail
    assert toy.cache.stats().tails == is_stored


def test_abandoned_leg_leaves_no_tail_and_no_pin() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10))
    draft = toy.draft(words(1, 11), 10, kept=2, tails=(11,), ends=True)
    toy.cache.abandon(toy.reserve(draft))
    toy.release(draft.request)
    assert toy.match(words(1, 11)).resumed_tokens == 10


def test_leg_that_names_a_tail_which_is_not_cached_is_refused() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 10))
    with pytest.raises(ValueError, match="starts 1 tokens after 8, cached are 2 after 8"):
        toy.reserve(toy.draft(words(1, 12), 9, kept=1))
    with pytest.raises(ValueError, match="where no hidden row is cached"):
        toy.reserve(toy.draft((*words(1, 10), 1), 10, kept=2, end=10, publish=8))


def test_neighbours_among_ten_thousand_children_are_found() -> None:
    toy = Toy(EVERY_PAGE)
    toy = Toy(replace(EVERY_PAGE, n_pages=60_000))
    serve(toy, words(1, 4))
    for first in range(0, 20_000, 2):
        toy.cache.index.add(toy.cache.index.roots[""], key_of((first, 1, 1, 1)), 1, toy.cache.pool.kv.take(1))
    assert toy.match((4_000, 1, 1, 7, 7)).resumed_tokens == 3
    assert toy.match((4_001, 1, 1, 7, 7)).resumed_tokens == 0


@pytest.mark.parametrize("layout", [TAILS, EVERY_PAGE], ids=["checkpoints", "every page"])
@pytest.mark.parametrize(
    ("asked", "common", "has_hidden"), [(words(1, 11), 3, True), (words(1, 10) + words(2, 1), 2, False)]
)
def test_held_prefix_pins_the_longest_tail_of_its_key(
    layout: CacheLayout, asked: Tokens, common: int, has_hidden: bool
) -> None:
    toy = Toy(layout)
    serve(toy, words(1, 11))
    (stored,) = toy.cache.tails
    held = toy.cache.hold(99, "", key_of(asked), 8)
    toy.cache.check()
    (tail,) = held.tails
    assert (tail.start, tail.end, tail.has_hidden) == (8, 8 + common, has_hidden)
    assert (tail.ids, stored.pins) == (stored.ids[: 4 * common], 1)
    with pytest.raises(AssertionError, match="is read"):
        toy.cache.tails.evict(stored)
    toy.cache.release(99)
    toy.cache.check()
    assert not stored.pins


def test_prompt_shorter_than_a_page_is_held_for_its_tail() -> None:
    toy = Toy(TAILS)
    serve(toy, words(1, 3))
    held = toy.cache.hold(99, "", key_of(words(1, 3)), 0)
    assert (list(held.table), [tail.end for tail in held.tails]) == ([], [3])
    toy.cache.check()
    toy.cache.release(99)
    assert toy.cache.hold(99, "", key_of(words(2, 3)), 0) is None
    toy.cache.check()

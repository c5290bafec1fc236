"""Stored segments next to prefixes: which is evicted first, and that no page is lost."""

from array import array
from dataclasses import replace

import pytest

from headwater.cache import PrefixCache
from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey, SegmentStore, StoredSegment
from headwater.errors import ConfigError, OutOfPages
from headwater.plan import CacheLayout
from headwater.request import SegmentEviction
from tests.cache.toy import LAYOUT, PAGE, Toy, publish_segment, reserve_segment, words

WIDTHS = Widths(2, 2)
WITH_TRANSITIONS = replace(LAYOUT, transition_pages=1)


def key(first: int, tokens: int = 10, namespace: str = "") -> SegmentKey:
    return SegmentKey(namespace, array("i", words(first, tokens)).tobytes(), WIDTHS)


def stored(cache: PrefixCache, wanted: SegmentKey) -> StoredSegment:
    made = reserve_segment(cache, wanted)
    publish_segment(cache, made)
    cache.check()
    return made


def test_a_segment_takes_pages_of_its_kv_states_and_transitions() -> None:
    toy = Toy(WITH_TRANSITIONS)
    made = reserve_segment(toy.cache, key(1, 11))
    assert (len(made.kv), len(made.state), len(made.transition), len(made.lent)) == (3, 2, 1, 2)
    assert toy.cache.stats().pages_slot == 2
    publish_segment(toy.cache, made)
    stats = toy.cache.stats()
    assert (stats.pages_segment, stats.pages_slot, stats.segments) == (6, 0, 1)
    toy.cache.check()


def test_unfinished_segment_is_never_used_and_frees_its_pages() -> None:
    toy = Toy(WITH_TRANSITIONS)
    free = toy.cache.stats().pages_free
    made = reserve_segment(toy.cache, key(1))
    with pytest.raises(ValueError, match="being built"):
        toy.cache.use_segment(made)
    with pytest.raises(ValueError, match="stored or being built"):
        reserve_segment(toy.cache, key(1))
    toy.cache.release(-1)
    toy.cache.check()
    assert toy.cache.stats().pages_free == free
    assert toy.cache.segments.find(key(1)) is None


def test_loaded_segment_is_found_once_complete() -> None:
    toy = Toy(WITH_TRANSITIONS)
    free = toy.cache.stats().pages_free
    plan = toy.cache.reserve_loaded_segment(-1, key(1, 11))
    assert plan.build is not None
    assert (len(plan.table), len(plan.build.state), len(plan.build.transition), len(plan.lent)) == (3, 2, 1, 0)
    assert (plan.start, plan.end, plan.build.is_last) == (0, 9, True)
    toy.cache.check()
    assert toy.cache.segments.find(key(1, 11)) is None
    assert not toy.cache.segments.evict(), "it is pinned"
    toy.cache.abandon(plan)
    toy.cache.release(-1)
    toy.cache.check()
    assert toy.cache.stats().pages_free == free
    toy.cache.commit(toy.cache.reserve_loaded_segment(-2, key(1, 11)))
    toy.cache.release(-2)
    toy.cache.check()
    found = toy.cache.segments.find(key(1, 11))
    assert found is not None
    assert (found.ready, found.pins) == (True, 0)


@pytest.mark.parametrize("built_first", [True, False])
def test_segment_built_during_its_load_is_stored_once(built_first: bool) -> None:
    toy = Toy(WITH_TRANSITIONS)
    plan = toy.cache.reserve_loaded_segment(-1, key(1))
    made = reserve_segment(toy.cache, key(1), -2)
    if built_first:
        publish_segment(toy.cache, made, -2)
    toy.cache.commit(plan)
    toy.cache.release(-1)
    toy.cache.check()
    if not built_first:
        publish_segment(toy.cache, made, -2)
    toy.cache.check()
    assert toy.cache.segments.find(key(1)) is made
    assert (len(toy.cache.segments), toy.cache.stats().pages_segment, made.pins) == (1, made.pages, 0)


def test_load_of_segment_without_room_changes_nothing() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=8))
    with pytest.raises(OutOfPages) as short:
        toy.cache.reserve_loaded_segment(-1, key(1, 30))
    assert (short.value.needed, short.value.free) == (7 + 2 + 1, 8)
    toy.cache.check()


def test_codes_are_equal_only_for_equal_keys() -> None:
    codes = {
        one.encoded for one in (key(1), key(2), key(1, 11), key(1, namespace="b"), replace(key(1), widths=Widths(3, 2)))
    }
    assert len(codes) == 5
    assert SegmentKey("ab", b"cdef", WIDTHS).encoded != SegmentKey("abcd", b"ef", WIDTHS).encoded
    assert key(1).encoded == key(1).encoded


def test_namespaces_and_widths_have_separate_segments() -> None:
    toy = Toy(WITH_TRANSITIONS)
    made = stored(toy.cache, key(1))
    assert toy.cache.segments.find(key(1)) is made
    assert toy.cache.segments.find(key(1, namespace="b")) is None
    assert toy.cache.segments.find(replace(key(1), widths=Widths(3, 2))) is None


def test_segments_beyond_budget_are_evicted_before_prefixes() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=40))
    toy.cache.segments.budget = 0.1
    toy.serve(words(1, 8))
    for i in range(3):
        stored(toy.cache, key(10 + i))
    assert toy.cache.segments.pages == 15  # memory was free: the budget of 4 pages is soft
    kept = toy.match((*words(1, 8), 0)).kv_tokens
    while not toy.cache.segments.evicted:
        toy.serve(words(100 + toy.requests, 16))
    assert toy.match((*words(1, 8), 0)).kv_tokens == kept == 8
    assert toy.cache.segments.find(key(10)) is None, "the oldest went first"
    assert toy.cache.segments.find(key(12)) is not None


def test_prefixes_are_evicted_before_segments_within_budget() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=40))
    made = stored(toy.cache, key(1))
    for i in range(12):
        toy.serve(words(20 + i, 16))
    assert toy.cache.segments.find(key(1)) is made
    assert toy.cache.stats().evicted_kv_pages > 0


def test_segment_is_evicted_if_no_prefix_can_be() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=20))
    stored(toy.cache, key(1))
    plan = toy.reserve(toy.draft(words(2, 16 * PAGE), 0, end=16 * PAGE, slot=True))
    assert toy.cache.segments.evicted == 1
    toy.cache.abandon(plan)
    toy.cache.check()


def test_pinned_segment_is_not_evicted() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=20))
    made = stored(toy.cache, key(1))
    toy.cache.segments.pin(made)
    with pytest.raises(OutOfPages):
        toy.reserve(toy.draft(words(2, 16 * PAGE), 0, end=16 * PAGE, slot=True))
    toy.cache.check()
    assert toy.cache.segments.find(key(1)) is made


def test_a_segment_that_does_not_fit_changes_nothing() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=8))
    with pytest.raises(OutOfPages) as short:
        reserve_segment(toy.cache, key(1, 30))
    assert (short.value.needed, short.value.free) == (7 + 2 + 1 + 2, 8)
    toy.cache.check()
    assert not len(toy.cache.segments)


def test_a_split_pool_never_exceeds_the_budget() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=100, state_fraction=0.5))
    toy.cache.segments.budget = 0.12
    for i in range(4):
        stored(toy.cache, key(10 + i))
        assert toy.cache.segments.pages <= 12
    assert [toy.cache.segments.find(key(10 + i)) is not None for i in range(4)] == [False, False, True, True]
    with pytest.raises(OutOfPages):
        reserve_segment(toy.cache, key(30, 50))
    toy.cache.check()


def test_cost_eviction_keeps_segments_that_save_more_per_page() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=200))
    toy.cache.segments.eviction = SegmentEviction.COST
    long, short = stored(toy.cache, key(1, 60)), stored(toy.cache, key(2, 5))
    assert toy.cache.segments.evict()
    assert toy.cache.segments.find(key(1, 60)) is long
    assert toy.cache.segments.find(key(2, 5)) is None
    assert short.worth < long.worth
    often = stored(toy.cache, key(3, 40))
    for _ in range(5):
        toy.cache.use_segment(often)
    toy.cache.segments.evict()
    assert toy.cache.segments.find(key(3, 40)) is often


def test_lru_evicts_the_least_recently_used_segment() -> None:
    toy = Toy(WITH_TRANSITIONS)
    first, _ = stored(toy.cache, key(1)), stored(toy.cache, key(2))
    toy.serve(words(5, 8))
    toy.cache.use_segment(first)
    toy.cache.segments.evict()
    assert toy.cache.segments.find(key(1)) is first
    assert toy.cache.segments.find(key(2)) is None


def test_a_budget_is_a_share() -> None:
    layout: CacheLayout = LAYOUT
    with pytest.raises(ConfigError, match=r"1\.5"):
        SegmentStore(layout, Toy().cache.pool, budget=1.5)


def test_first_use_of_a_segment_is_its_builders() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=200))
    made = reserve_segment(toy.cache, key(1))
    publish_segment(toy.cache, made)
    fresh = made.worth
    toy.cache.use_segment(made)
    assert made.worth == fresh
    toy.cache.use_segment(made)
    assert made.worth == 2 * fresh


def test_segment_built_for_a_request_is_kept_until_it_begins() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=200))
    used = stored(toy.cache, key(1))
    toy.cache.use_segment(used)
    waited_for = [stored(toy.cache, key(number)) for number in (2, 3, 4)]
    toy.cache.segments.evict()
    assert toy.cache.segments.find(used.key) is None, "it served one request, and has been there longest"
    assert all(toy.cache.segments.find(made.key) is made for made in waited_for)


def test_often_used_segment_outlives_those_used_once() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=200))
    often = stored(toy.cache, key(1))
    for _ in range(3):
        toy.cache.use_segment(often)
    for number in range(2, 5):
        toy.cache.use_segment(stored(toy.cache, key(number)))
    for _ in range(3):
        toy.cache.segments.evict()
    assert list(toy.cache.segments) == [often]


def test_often_used_segment_is_evicted_after_long_disuse() -> None:
    toy = Toy(replace(WITH_TRANSITIONS, n_pages=200))
    often = stored(toy.cache, key(1))
    for _ in range(3):
        toy.cache.use_segment(often)
    for number in range(2, 6):
        toy.cache.use_segment(stored(toy.cache, key(number)))
        toy.cache.segments.evict()
    assert toy.cache.segments.find(often.key) is None

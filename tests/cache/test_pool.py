"""Pools of pages: of one size, with shares of states, and elastic ones."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.cache.pool import Pool, Region
from headwater.errors import OutOfPages
from headwater.plan import CacheLayout
from tests.cache.toy import LAYOUT, PAGE, Toy, changed, words
from tests.support import examples


def test_taking_more_pages_than_free_raises_without_change() -> None:
    region = Region(0, 3)
    with pytest.raises(ValueError, match="4 pages are needed, 3 are free"):
        region.take(4)
    assert region.free == 3


def test_one_pool_by_default_and_two_with_a_state_fraction() -> None:
    one = Pool(CacheLayout(n_pages=10))
    two = Pool(CacheLayout(n_pages=10, state_fraction=0.3))
    assert one.kv is one.states
    assert sorted(two.kv.free_ids()) == list(range(7))
    assert sorted(two.states.free_ids()) == [7, 8, 9]


def test_check_finds_pages_owned_twice_lost_or_free_and_owned() -> None:
    pool = Pool(CacheLayout(n_pages=4))
    first, second = pool.kv.take(2)
    pool.check([first], [second])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([first, first], [second])
    with pytest.raises(AssertionError, match="4 pages, but 2 free and 1 owned"):
        pool.check([first], [])
    pool.kv.give((first,))
    with pytest.raises(AssertionError, match="both free and owned"):
        pool.check([first, second], [])
    pool.kv.give((first,))
    with pytest.raises(AssertionError, match="free twice"):
        pool.check([second], [])


def test_check_finds_a_page_of_the_other_region() -> None:
    pool = Pool(CacheLayout(n_pages=4, state_fraction=0.5))
    page, state = pool.kv.take(1)[0], pool.states.take(1)[0]
    pool.check([page], [state])
    with pytest.raises(AssertionError, match="belongs to the other region"):
        pool.check([state], [page])
    pool.states.give((page,))
    with pytest.raises(AssertionError, match="belongs to the other region"):
        pool.check([page], [state])


def test_elastic_regions_trade_only_spare_pages_in_whole_steps() -> None:
    pool = Pool(CacheLayout(n_pages=20, state_fraction=0.5, elastic_pages=4))
    pool.trade(kv=11, states=3)
    assert (pool.kv.size, pool.states.size) == (14, 6)
    pool.trade(kv=15, states=3)  # the three that states can spare are less than a step
    assert (pool.kv.size, pool.states.size) == (14, 6)
    pages = pool.kv.take(14)
    pool.check(list(pages), [])
    pool.kv.give(pages)
    pool.trade(kv=0, states=20)
    assert (pool.kv.size, pool.states.size) == (2, 18)
    pool.check([], [])


def test_shortage_counts_pages_that_the_other_region_lends() -> None:
    layout = CacheLayout(n_pages=20, state_fraction=0.5, elastic_pages=4)
    rigid, elastic = Pool(CacheLayout(n_pages=20, state_fraction=0.5)), Pool(layout)
    assert rigid.shortage(11, 1) == (11, 10, 0)
    assert rigid.shortage(11, 1, evictable=(1, 0)) is None
    assert elastic.shortage(18, 2) is None
    assert elastic.shortage(18, 3) == (18, 10, 4)
    assert elastic.shortage(3, 15) == (15, 10, 4)
    assert elastic.shortage(3, 15, evictable=(1, 0)) is None
    assert elastic.shortage(11, 10) == (11, 10, 0)
    assert Pool(CacheLayout(n_pages=20)).shortage(18, 3, evictable=(0, 0)) == (21, 20, 0)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a set of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(CacheLayout(n_pages=12, state_fraction=0.5, elastic_pages=2))
        self.taken: list[tuple[Region, int]] = []

    @rule(kv=st.integers(0, 8), states=st.integers(0, 8))
    def trade(self, kv: int, states: int) -> None:
        pool = self.pool
        fits = pool.shortage(kv, states) is None
        before = pool.kv.size
        pool.trade(kv, states)
        assert (pool.kv.free >= kv and pool.states.free >= states) is fits
        assert (pool.kv.size - before) % 2 == 0

    @rule(states=st.booleans(), count=st.integers(0, 8))
    def take(self, states: bool, count: int) -> None:
        region = self.pool.states if states else self.pool.kv
        if count <= region.free:
            self.taken += [(region, page) for page in region.take(count)]

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.taken:
            region, page = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
            region.give((page,))

    @invariant()
    def every_page_is_free_or_owned(self) -> None:
        owned = [[page for region, page in self.taken if region is of] for of in (self.pool.kv, self.pool.states)]
        self.pool.check(*owned)
        assert self.pool.free == 12 - len(self.taken)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(40), stateful_step_count=20)


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
    kept = changed(other, start=16, end=17, publish=16, checkpoints=(), slot=False, hold_checkpoint=False)
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

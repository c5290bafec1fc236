"""Pages are taken and given back; each is free or has one owner."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.cache.pool import Pool, Region
from headwater.types import CacheLayout


def test_taking_more_than_is_free_takes_nothing() -> None:
    region = Region(0, 3)
    with pytest.raises(ValueError, match="4 pages asked for, 3 are free"):
        region.take(4)
    assert region.free == 3


def test_one_pool_by_default_and_two_with_a_state_fraction() -> None:
    one = Pool(CacheLayout(n_pages=10))
    two = Pool(CacheLayout(n_pages=10, state_fraction=0.3))
    assert one.kv is one.states
    assert sorted(two.kv.free_ids()) == list(range(7))
    assert sorted(two.states.free_ids()) == [7, 8, 9]


def test_check_finds_a_page_that_is_owned_twice_lost_or_free_and_owned() -> None:
    pool = Pool(CacheLayout(n_pages=4))
    first, second = pool.kv.take(2)
    pool.check([first, second])
    with pytest.raises(AssertionError, match="two owners"):
        pool.check([first, first, second])
    with pytest.raises(AssertionError, match="4 pages, but 2 free and 1 owned"):
        pool.check([first])
    pool.kv.give((first,))
    with pytest.raises(AssertionError, match="both free and owned"):
        pool.check([first, second])
    pool.kv.give((first,))
    with pytest.raises(AssertionError, match="free twice"):
        pool.check([second])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a set of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(CacheLayout(n_pages=12, state_fraction=0.5))
        self.taken: list[tuple[Region, int]] = []

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
        self.pool.check([page for _, page in self.taken])
        assert self.pool.free == 12 - len(self.taken)
        assert all(page in region.ids for region, page in self.taken)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)

"""Shares of two engines in one memory: pages move to the one that evicts, and both stay exact."""

import pytest

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.shares import Shares
from headwater.errors import OutOfPages, RequestTooLarge
from headwater.setting import SettingError
from tests.exactness.rig import words

PAGES = 60  # an equal share
LONG = [words(500, "long", i) for i in range(12)]


@pytest.fixture
def rigs(make, loaded):
    most = (PAGES + PAGES // 2) * loaded.spec.page_bytes
    with make(PAGES, max_memory=most) as one, make(PAGES, max_memory=most) as other:
        yield one, other


@pytest.fixture
def shares(rigs, monkeypatch):
    found = Shares([rig.engine for rig in rigs])
    found.idle_seconds = 0.0
    return found


def sizes(rigs):
    for rig in rigs:
        rig.engine.scheduler.cache.check()
    return [rig.engine.scheduler.cache.pool.size for rig in rigs]


def press(rig, shares, looks):
    """Ask more than a share holds, several times over, and look at evictions after each request."""
    for i in range(looks):
        rig.ask(LONG[i % len(LONG)], 4)
        rig.settle()
        shares.balance()


def test_pages_of_an_idle_engine_go_to_the_busy_one_and_come_back(rigs, shares):
    one, other = rigs
    assert sizes(rigs) == [PAGES, PAGES]
    other.ask(LONG[0], 4)
    press(one, shares, 24)
    assert sizes(rigs) == [PAGES + PAGES // 2, PAGES // 2]
    assert one.engine.health()["memory_pages"] == one.engine.stats().cache.pages_total == PAGES + PAGES // 2
    press(other, shares, 48)
    assert sizes(rigs) == [PAGES // 2, PAGES + PAGES // 2]


def test_answers_of_both_keep_their_bits_while_memory_moves(rigs, shares, make):
    with make(400, cache=False) as alone:
        colds = [alone.ask(prompt, 4) for prompt in LONG]
    for turn in range(4):
        for i, cold in enumerate(colds):
            rig = rigs[(turn + i // 6) % 2]
            assert rig.ask(LONG[i], 4).same_bits(cold)
            shares.balance()
    assert sum(sizes(rigs)) == 2 * PAGES
    assert max(sizes(rigs)) > PAGES


def test_cached_content_of_an_engine_that_is_not_idle_stays(rigs, shares):
    one, other = rigs
    shares.idle_seconds = 1e9
    for prompt in LONG:
        other.ask(prompt, 4)
        other.settle()
    shares.balance()
    free = other.engine.stats().cache.pages_free
    press(one, shares, 24)
    assert PAGES - free <= sizes(rigs)[1] <= PAGES


def test_engine_below_its_equal_share_gets_memory_of_one_that_evicts_too(rigs, shares):
    press(rigs[0], shares, 24)
    for i in range(24):
        for rig in rigs:
            rig.ask(LONG[i % len(LONG)], 4)
            rig.settle()
        shares.balance()
    assert sizes(rigs) == [PAGES, PAGES]


def test_longest_request_fits_into_the_half_that_always_stays(rigs, shares):
    one, other = rigs
    press(one, shares, 24)
    most = other.engine.max_model_len
    assert most == (PAGES // 2 - other.engine.scheduler.layout.slot_pages) * 64
    other.ask(words(most - 4, "most"), 4)
    with pytest.raises(RequestTooLarge):
        other.ask(words(most, "more"), 4)


def test_pages_of_running_requests_are_not_lent(rigs):
    evictor = rigs[0].engine.scheduler.cache.evictor
    with pytest.raises(OutOfPages):
        evictor.lend(PAGES + 1, 0)
    assert sizes(rigs) == [PAGES, PAGES]


def test_memory_below_one_request_of_each_model_is_refused(make, loaded):
    size = 2 * loaded.spec.page_bytes
    with pytest.raises(SettingError, match=r"a model keeps 1 pages of [\d,]+ bytes, and a request takes \d"):
        Engine.over(loaded, make.check, ServeConfig(memory=size, max_memory=2 * size))

"""Tiers in the lab: what a store below memory gives by its size and bandwidth, under the server's rule and others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Row
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.lab.tiers import TierLaw
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Trace
from tests.lab.test_sequential import PAGE, PROFILE, chat

COST = StepCost(PROFILE, load_device("cpu"))
PAGE_BYTES = PAGE * PROFILE.kv_bytes_per_token


def sessions(count: int = 12) -> Trace:
    """Sessions that take turns: between two turns of one come turns of all others."""
    each = [chat(f"{i:02}", 1, 3, 400, 300) for i in range(count)]
    return Trace("made", [request for turn in zip(*each, strict=True) for request in turn])


def serving(tier: str, pages: int = 600) -> Serving:
    setup = Setup(PROFILE, pages * PAGE_BYTES, page_size=PAGE, tier=TierLaw.read(tier), running=4)
    run = Serving(sessions(), setup, Engine(COST, max_running=4))
    run.run(make_arrivals(run.trace, "poisson(rate=0.5, think=20)", seed=3))
    return run


def served(tier: str, pages: int = 600) -> Row:
    setup = Setup(PROFILE, pages * PAGE_BYTES, page_size=PAGE, tier=TierLaw.read(tier), running=4)
    trace = sessions()
    arrivals = make_arrivals(trace, "poisson(rate=0.5, think=20)", seed=3)
    return replace(replay(trace, setup, arrivals, Engine(COST, max_running=4)).row, seconds=0, peak_rss_mb=0)


def test_a_tier_hits_where_memory_is_short_and_a_run_repeats() -> None:
    off, tiered = served("off"), served("100GB@100GB/s")
    assert tiered.token_hit_rate > off.token_hit_rate + 0.1
    assert tiered.loaded_tokens > 0 == off.loaded_tokens
    assert tiered.ttft_ms is not None
    assert off.ttft_ms is not None
    assert tiered.ttft_ms.mean < off.ttft_ms.mean
    assert served("100GB@100GB/s") == tiered
    assert (off.tier, tiered.tier) == ("off", "100GB@100GB/s")


def test_parts_in_memory_are_not_loaded() -> None:
    assert served("100GB@100GB/s", pages=50_000).loaded_tokens == 0


def test_a_slow_tier_is_read_only_by_one_that_always_loads() -> None:
    slow, always = served("100GB@100kB/s"), served("100GB@100kB/s/always")
    assert slow.loaded_tokens == 0 < always.loaded_tokens
    assert slow.ttft_ms is not None
    assert always.ttft_ms is not None
    assert slow.ttft_ms.mean < always.ttft_ms.mean


def test_a_small_tier_holds_no_more_than_its_size() -> None:
    size = 400 * PAGE_BYTES
    run = serving(f"{size}B@100GB/s")
    assert run.tiers is not None
    store = run.tiers.store
    assert store is not None
    run.scheduler.cache.check()
    assert 0 < store.catalog.bytes <= size
    assert store.catalog.stranded() == []
    assert store.catalog.bytes <= store.peak_bytes <= size < store.written_bytes


def test_selective_storing_writes_less_and_hits_less() -> None:
    through, selective = served("100GB@100GB/s"), served("100GB@100GB/s/selective")
    assert 0 < selective.tier_written_bytes < through.tier_written_bytes
    assert 0 < selective.loaded_tokens < through.loaded_tokens


@pytest.mark.parametrize("text", ["on", "100GB", "100GB@2GB", "@2GB/s", "100GB@2GB/s/never", "0GB@2GB/s", "1GB@0B/s"])
def test_other_laws_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tier is"):
        TierLaw.read(text)
    for good in ("off", "100GB@2GB/s", "1TB@500MB/s/always", "1TB@2GB/s/selective", "1TB@2GB/s/always/selective"):
        assert str(TierLaw.read(good) or "off") == good

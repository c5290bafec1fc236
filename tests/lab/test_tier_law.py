"""Tiers in the lab: their law, and the memory and disk that recorded traffic needs."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from headwater.cli import run
from headwater.errors import ConfigError
from headwater.journal import Journal
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Row
from headwater.lab.serving import Engine, Serving
from headwater.lab.setup import Setup
from headwater.lab.tiered_size import TieredSize, TierGrid, tiered_advice
from headwater.lab.tiers import TierLaw
from headwater.traces.arrivals import Arrivals
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


@cache
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
    assert served.__wrapped__("100GB@100GB/s") == tiered
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


AMPLE, SHORT = 20_000 * PAGE_BYTES, 600 * PAGE_BYTES
LOAD: Callable[[Trace], Arrivals] = partial(make_arrivals, spelling="poisson(rate=0.5, think=20)", seed=3)


def grid(*tiers: str) -> TierGrid:
    setup = Setup(PROFILE, 0, page_size=PAGE, running=4, reuse="prefix")
    laws = tuple(map(TierLaw.read, tiers))
    return TierGrid(sessions(), setup, Engine(COST, max_running=4), (SHORT, AMPLE), laws)


def test_tier_replaces_memory_and_reports_its_used_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.json", ["about"])
    wanted = grid("off", "1TB@100GB/s", "1TB@100GB/s/selective")
    found = {(one.memory, one.tier): one for one in wanted.replayed(LOAD, journal, 1)}
    assert len(found) == 6
    alone, above = found[SHORT, "off"], found[SHORT, "1TB@100GB/s"]
    assert (alone.disk, alone.loaded) == (0, 0)
    assert above.hit_rate > alone.hit_rate + 0.1
    assert above.hit_rate < found[AMPLE, "off"].hit_rate
    assert above.loaded > 0 < above.disk
    assert above.ttft_p50 <= above.ttft_p95 < alone.ttft_p95
    selective = found[SHORT, "1TB@100GB/s/selective"]
    assert alone.hit_rate <= selective.hit_rate <= above.hit_rate
    assert 0 < selective.disk < above.disk, "only what was hit is stored"
    again = Journal(tmp_path / "out.json", ["about"])
    assert {(one.memory, one.tier): one for one in wanted.replayed(None, again, 1)} == found  # type: ignore[arg-type]


def test_advice_by_hand() -> None:
    def size(memory: int, tier: str, hit_rate: float, disk: int = 0) -> TieredSize:
        return TieredSize(memory * 10**9, tier, hit_rate, 0.0, disk * 10**9, 1.0, 2.0)

    sizes = [
        size(1, "off", 0.1), size(2, "off", 0.45), size(4, "off", 0.8),
        size(1, "9GB@1GB/s", 0.42, 9), size(2, "9GB@1GB/s", 0.5, 9), size(4, "9GB@1GB/s", 0.8, 9),
    ]  # fmt: skip
    assert tiered_advice(sizes, 0.8) == [
        "50% of infinite memory's hits: 1 GB and 9 GB in a tier of 9GB@1GB/s, or 2 GB of memory.",
        "99% of infinite memory's hits: 4 GB of memory.",
    ]
    assert tiered_advice([size(1, "off", 0.1)], 0.8) == ["No tried size reaches half of infinite memory's hits."]
    assert tiered_advice([size(1, "9GB@1GB/s", 0.8, 7)], 0.8) == [
        "99% of infinite memory's hits: 1 GB and 7 GB in a tier of 9GB@1GB/s."
    ]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    lines = []
    for number in range(12):
        ids = list(range(1 + number % 4, 400))
        lines.append(json.dumps({"t": number, "session": f"{number % 4}", "input": ids, "output": [1, 2]}))
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_command_prints_and_writes_memory_and_disk(recorded: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "out.json"
    options = ["--from", "1GB", "--to", "2GB", "--points", "2", "--serve", "h100", "--tier", "off,1TB@2GB/s"]
    assert run(["size", str(recorded), *options, "--jobs", "1", "--json", str(out)]) == 0
    printed, told = capfd.readouterr().out, json.loads(out.read_text())
    found = [(one["memory"], one["tier"]) for one in told["sizes"]]
    assert found == [(size, tier) for size in (10**9, 2 * 10**9) for tier in ("off", "1TB@2GB/s")]
    assert told["sizes"][1]["disk"] > 0
    assert all(line in printed for line in told["advice"])
    assert not list(tmp_path.glob(".*.unfinished"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tier", "1TB@2GB/s"], "--tier 1TB@2GB/s and --serve off: each needs the other"),
        (["--serve", "h100"], "--tier off and --serve h100: each needs the other"),
        (["--serve", "h100", "--tier", "1TB@2GB/s", "--check"], "with --tier all replays are full"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(recorded: Path, capfd, options, error) -> None:
    assert run(["size", str(recorded), *options]) == 2
    assert error in capfd.readouterr().err.splitlines()[-1]

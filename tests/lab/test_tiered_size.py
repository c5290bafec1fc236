"""Memory and disk that recorded traffic needs: the grid of both, its journal, and advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from headwater.cli import run
from headwater.journal import Journal
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.lab.tiered_size import TieredSize, TierGrid, tiered_advice
from headwater.lab.tiers import TierLaw
from headwater.traces.arrivals import Arrivals
from headwater.traces.loads import make_arrivals
from headwater.traces.request import Trace
from tests.lab.test_sequential import PAGE, PROFILE
from tests.lab.test_tier_law import COST, PAGE_BYTES, sessions

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

"""`headwater replay --workers`: its tables, its files, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headwater.cli import run

TRAFFIC = ("replay", "generated(17, requests=40)", "--memory", "4GB", "--arrival", "8", "--jobs", "1")


def test_routers_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--router", "least_cost,round_robin", "--event-delay", "0.1")
    assert run([*TRAFFIC, *options, "--json", str(out), "--report", str(tmp_path / "page.html")]) == 0
    printed = capfd.readouterr().out
    for part in ("3 simulated workers", "predicted", "least_cost", "round_robin"):
        assert part in printed
    rows = json.loads(out.read_text())["rows"]
    assert [row["cluster"]["router"] for row in rows] == ["least_cost", "round_robin"]
    for row in rows:
        assert sum(worker["requests"] for worker in row["cluster"]["workers"]) == row["requests"]
        assert row["cluster"]["event_delay"] == 0.1
        counts = [worker["requests"] for worker in row["cluster"]["workers"]]
        assert re.search(rf" {min(counts)}(-{max(counts)})? ", printed)


def test_numbers_of_workers_that_prefill_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--pulls", "12.5GB/s", "--prefill", "0,1", "--json", str(out))
    assert run([*TRAFFIC, *options]) == 0
    rows = [row["cluster"] for row in json.loads(out.read_text())["rows"]]
    assert [row["prefill"] for row in rows] == [0, 1]
    assert rows[0]["handed_over"] == 0 < rows[1]["handed_over"]
    printed = " ".join(capfd.readouterr().out.split())
    assert f"handed over {rows[1]['handed_over']}, " in printed
    assert "its p95" in printed


def test_failures_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--failures", "off,5s/2s", "--json", str(out))
    brief = ("replay", "rag(sessions=20)", *TRAFFIC[2:])  # TRAFFIC pauses for a day, in which 5,000 workers fail
    assert run([*brief, *options]) == 0
    whole, failing = (row["cluster"] for row in json.loads(out.read_text())["rows"])
    assert (whole["failures"], failing["failures"]) == ("off", "5s/2s")
    assert whole["failed"] == 0 < failing["failed"]
    assert failing["resumed"] > 0 < failing["moved"]
    assert len(failing["workers"]) == 3 + failing["replaced"]
    printed = " ".join(capfd.readouterr().out.split())
    assert f"failed {failing['failed']:,}, resumed {failing['resumed']}, moved {failing['moved']}" in printed


def test_each_table_labels_rows_of_different_memory(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--serve", "h100", "--workers", "2", "--eviction", "lru,headwater")
    assert run([*TRAFFIC, *options, "--memory", "3GB,4GB"]) == 0
    tables = [table for table in re.split(r"\n(?=[┏┌])", capfd.readouterr().out) if "│" in table]
    for column in ("FLOPs", "predicted"):
        (table,) = [one for one in tables if column in one]
        for label in (" 3 ", " 4 ", "lru", "headwater"):
            assert label in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2"), "--workers 2 needs --serve"),
        (("--serve", "h100", "--router", "least_cost"), "--router least_cost needs --workers"),
        (("--serve", "h100", "--event-delay", "0"), "--event-delay 0 needs --workers"),
        (("--serve", "h100", "--prefill", "1"), "--prefill 1 needs --workers"),
        (("--serve", "h100", "--failures", "60s"), "--failures 60s needs --workers"),
        (("--serve", "h100", "--workers", "2", "--failures", "60"), "failures are '60', must be off or EVERY"),
        (("--serve", "h100", "--workers", "2", "--prefill", "few"), "--prefill has 'few', must have numbers"),
        (("--serve", "h100", "--workers", "2", "--prefill", "1"), "prefill is 1 of 2 workers with pulls off"),
        (
            ("--serve", "h100", "--workers", "2", "--pulls", "1GB/s", "--prefill", "1", "--decode-reuse", "raw"),
            "--prefill 1 excludes --decode-reuse raw",
        ),
        (("--serve", "h100", "--workers", "0"), "'--workers': Input should be"),
        (("--serve", "h100", "--workers", "2", "--router", "best"), "router 'best' is unknown; there are aibrix"),
        (("--serve", "h100", "--workers", "2", "--router", "aibrix(1,2,3,4)"), "router 'aibrix(1,2,3,4)' cannot be"),
        (
            ("--serve", "h100", "--workers", "2", "--event-delay", "-1"),
            "'--event-delay': Input should be",
        ),
    ],
)
def test_bad_input_is_named(options: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAFFIC, *options]) == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())

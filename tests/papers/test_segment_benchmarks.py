"""The benchmarks of segments: what they say when there is nothing to measure, or not what their words say."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import headwater.cli
from benchmarks.segments import _expect
from headwater.account import CacheAccount, Reason
from papers.hypic.measured import HYPIC, PREFIX, RECOMPUTE
from tests.papers.test_hypic import evaluated

LOST = dict.fromkeys(("naive", "w0", "w4", "fast", "w16", "w32", "balanced", "high"), 0.0)


def started(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def test_answers_are_evaluated_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def evaluate(arguments: list[str]) -> int:
        asked.append(arguments)
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(evaluated(LOST)))
        return 0

    monkeypatch.setattr(headwater.cli, "run", evaluate)
    started("segment_quality", "--every", "40", "--out", str(tmp_path), monkeypatch=monkeypatch)
    (command,) = asked
    assert command[:2] == ["eval", "--segments"]
    assert json.loads((tmp_path / "hypic-10.json").read_text())["rows"][0]["ours"] == 100


def test_evaluation_that_fails_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(headwater.cli, "run", lambda arguments: 2)
    with pytest.raises(SystemExit, match="2"):
        started("segment_quality", "--every", "40", "--out", str(tmp_path), monkeypatch=monkeypatch)
    assert not list(tmp_path.iterdir())


def test_empty_set_of_prompts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="0 prompts of 2 to 3 tokens"):
        started("segment_choices", "--shortest", "2", "--longest", "3", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("way", "segments", "cached", "fits"),
    [
        (RECOMPUTE, 0, 0, True),
        (RECOMPUTE, 0, 64, False),
        (PREFIX, 0, 64, True),
        (PREFIX, 0, 128, False),  # it found more than the leading part
        (HYPIC, 4, 4000, True),
        (HYPIC, 3, 3000, False),
    ],
)
def test_method_that_was_not_applied_is_not_measured(way: str, segments: int, cached: int, fits: bool) -> None:
    account = CacheAccount(4096, cached, 0, 0, Reason.COLD, segments=segments)
    if fits:
        _expect(SimpleNamespace(account=account), way, 4)
    else:
        with pytest.raises(RuntimeError, match=way):
            _expect(SimpleNamespace(account=account), way, 4)

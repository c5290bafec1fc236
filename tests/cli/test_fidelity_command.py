"""`headwater fidelity`, as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.cli import run


def test_it_tells_each_way_and_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    ways = ("--way", "naive", "--way", "fast")
    assert run(["fidelity", "--cut", "300", "--parts", "3", *ways, "--threads", "2", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert all(title in told for title in ("composed against whole", "states after", "keys and values", "ends of 8"))
    found = json.loads(file.read_text())
    fast, naive = (found["ways"][way]["mean"] for way in ("fast", "naive"))
    assert fast["states"]["0"]["error"] <= 1e-5 < naive["states"]["0"]["error"]
    assert fast["anew"] == pytest.approx((100 + 32 + 1) / 301)
    assert found["ways"]["fast"]["prompts"][0]["anew"] == 133
    assert found["attention"]


def test_a_model_that_keeps_a_window_is_refused(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fidelity", str(checkpoint("qwen3_window"))]) == 2
    assert "keeps a window" in capsys.readouterr().err

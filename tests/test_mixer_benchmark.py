"""The benchmark of recurrent layers runs, and measures every kind of them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
A_LENGTH = 3  # ratios: to transformers', with every state kept, with the transition


def test_it_writes_a_figure_for_every_layer_and_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mixers.json"
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["mixers.py", "--small", "--repeats", "1", "--out", str(out)])
    ran = runpy.run_path(str(FOLDER / "mixers.py"), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    for name in ran["LAYERS"]:
        own = [row for row in rows if row["name"].startswith(f"{name}, ")]
        assert len([row for row in own if row["goal"]]) == A_LENGTH * len(ran["SMALL_TOKENS"]) + 1
        assert all(row["median"] > 0 for row in own)

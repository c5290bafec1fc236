"""The benchmark of recurrent layers runs, and measures every kind of them."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

A_LENGTH = 2  # ratios: with every state kept, with the transition; and to transformers' where it has such a layer


def test_it_writes_a_figure_for_every_layer_and_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mixers.json"
    monkeypatch.setattr(sys, "argv", ["mixers.py", "--small", "--repeats", "1", "--threads", "1", "--out", str(out)])
    before = torch.get_num_threads()
    ran = runpy.run_module("benchmarks.mixers", run_name="__main__")
    torch.set_num_threads(before)
    rows = json.loads(out.read_text())["rows"]
    for name, compared in ran["LAYERS"].items():
        own = [row for row in rows if row["name"].startswith(f"{name}, ")]
        a_length = A_LENGTH + (compared.theirs is not None)
        assert len([row for row in own if row["goal"]]) == a_length * len(ran["SMALL_TOKENS"]) + 1
        # What is left without products is a difference: of times as short as these it may be anything.
        assert all(row["median"] > 0 for row in own if "between products" not in row["name"])

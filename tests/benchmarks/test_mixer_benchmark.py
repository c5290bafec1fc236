"""The benchmark of recurrent layers runs, and measures every kind of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import mixers

A_LENGTH = 2  # ratios: with every state kept, with the transition; and to transformers' where it has such a layer


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(names: Collection[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The rows that the benchmark writes of these layers."""
    out = folder / "mixers.json"
    monkeypatch.setattr(mixers, "LAYERS", {name: mixers.LAYERS[name] for name in names})
    monkeypatch.setattr(sys, "argv", ["mixers.py", "--small", "--repeats", "1", "--threads", "1", "--out", str(out)])
    mixers.main()
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize(
    "names",
    [
        {next(name for name, one in mixers.LAYERS.items() if one.theirs is not None)},
        pytest.param({next(name for name, one in mixers.LAYERS.items() if one.theirs is None)}, marks=pytest.mark.full),
        pytest.param(mixers.LAYERS, marks=pytest.mark.full),
    ],
    ids=["that transformers has", "that transformers has not", "all"],
)
def test_mixer_benchmark_writes_a_figure_per_layer_and_goal(
    names: Collection[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(names, tmp_path, monkeypatch)
    for name in names:
        own = [row for row in rows if row["name"].startswith(f"{name}, ")]
        a_length = A_LENGTH + (mixers.LAYERS[name].theirs is not None)
        assert len([row for row in own if row["goal"]]) == a_length * len(mixers.SMALL_TOKENS) + 1
        # Time without products is a difference, which for times as short as these may have any sign.
        assert all(row["median"] > 0 for row in own if "between products" not in row["name"])

"""`headwater fidelity`, as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.cli import run


def test_fidelity_reports_each_mode_and_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("skipping", [(), ("--skip-attention",)])
def test_fidelity_of_a_window_model_reports_keys_and_values(
    skipping: tuple[str, ...], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Layers of full attention and layers with a window report them; without attention no layer does."""
    file = tmp_path / "found.json"
    options = ("--cut", "300", "--parts", "3", "--way", "fast", "--threads", "2", "--json", str(file), *skipping)
    assert run(["fidelity", str(checkpoint("qwen3_window")), *options]) == 0
    kept = json.loads(file.read_text())["ways"]["fast"]["mean"]["kept"]
    assert [*kept] == ([] if skipping else ["0", "2"])
    assert all(set(of_layer) == {"keys", "values"} for of_layer in kept.values())
    assert all(
        distance["error"] <= 1e-5 for layer, names in kept.items() for distance in names.values() if layer == "0"
    )

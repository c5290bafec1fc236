"""From nothing to a checkpoint that is served, in one command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.models.load import load_model
from tests.support import Bench
from training.curve import circles, draw, lines

ROOT = Path(__file__).parents[2]


def test_one_command_trains_a_checkpoint_that_is_served_and_its_picture(tmp_path: Path) -> None:
    """One test of one run, so that two test processes do not train twice."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "training", "--recipe", "smoke", "--no-compile", "--out", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "step 20 of 25" in ended.stdout
    assert ended.stdout.count("held out  length") == 3

    losses = [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 25
    assert sum(losses[-5:]) / 5 < 0.9 * losses[0]

    loaded = load_model(folder / "checkpoint", "float32")
    tokens = loaded.tokenizer.encode("Documents:\n\nThe mayor of Port Oslen is Mara Teldin.").ids
    bench = Bench(loaded.model)
    logits = bench.prefill(bench.sequence(len(tokens)), tokens)
    assert logits.isfinite().all()
    assert logits.std() > 0

    draw(folder / "log.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_lines_are_means_weighted_by_answers() -> None:
    entries = [
        {"tokens": 10, "loss": 4.0, "n_single": 1, "right_single": 1.0},
        {"tokens": 10, "loss": 2.0, "n_single": 3, "right_single": 0.0},
        {"tokens": 20, "loss": 1.0, "n_absent": 2, "right_absent": 0.5},
    ]
    seen, found = lines(entries, points=2)
    assert seen == [20e-6, 40e-6]
    assert found == {"loss": [3.0, 1.0], "single": [0.25, None], "absent": [None, 0.5]}


def test_circles_are_of_all_lengths_together() -> None:
    row = {"length": 256, "n_single": 1, "right_single": 1.0}
    entries = [
        {"tokens": 10},
        {"tokens": 10, "held_out": [row, {**row, "length": 512, "n_single": 3, "right_single": 0.0}]},
    ]
    assert circles(entries) == {"single": [(20e-6, 0.25)]}


@pytest.mark.full
def test_step_is_computed_where_the_model_is() -> None:
    """On a device that is not the CPU; tensors left there are refused."""
    command = [sys.executable, "-m", "tests.training.pretended_device"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["learned 512"] * 2
    assert "mixed:" in ended.stdout

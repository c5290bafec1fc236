"""llama.cpp reads the GGUF files that tests write, and answers as Headwater does; so it does with its own quantiser's.

`make test-peers` runs this, with the extra `peers` or an environment that has it: VENV_LLAMA=FOLDER.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.models.load import load_model
from tests.checkpoints import write
from tests.checkpoints.state_spaces import NEMOTRON_H
from tests.gguf_files.blocks import ALL_FORMATS
from tests.gguf_files.convert import convert
from tests.support import Bench

pytestmark = pytest.mark.peers
PROGRAM = Path(__file__).parents[1] / "gguf_files" / "llama.py"
PROMPT = list(range(300, 340))
N_TOKENS, N_CHOICES = 32, 4000
MIN_MARGIN = 1e-3  # between the logits of two tokens: below it roundings choose
MAX_DIVERGENCE = 0.01  # nats, mean over tokens: rows are rounded in other groups
OWN = {"nemotron_h_moe": "M*E", "nemotron_h_dense": "M*-"}  # llama.cpp has no model with both
FAMILIES = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "granite", "granite_moe",
    "falcon_h1", "jamba", "jamba_moe", "mamba", "mamba2", *OWN,
)  # fmt: skip


def by_llama(*arguments: str) -> Any:
    folder = os.environ.get("VENV_LLAMA")
    if not folder and not find_spec("xllamacpp"):
        pytest.skip("no llama.cpp: install the extra peers, or name an environment that has it: VENV_LLAMA=FOLDER")
    python = f"{folder}/bin/python" if folder else sys.executable
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([python, str(PROGRAM), *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout) if run.stdout else None


def logits_after(file: Path, tokens: list[int]) -> Tensor:
    """Our logits for each of their tokens."""
    bench = Bench(load_model(file, "float32").model)
    sequence = bench.sequence(len(PROMPT) + len(tokens))
    rows = [bench.prefill(sequence, PROMPT)]
    rows += [bench.step([], [(sequence, token)]) for token in tokens[:-1]]
    return torch.stack([row.view(-1, row.shape[-1])[-1].float() for row in rows])


def compared(file: Path) -> tuple[list[int], list[int], float, float]:
    """Their tokens and ours, the smallest margin of our first two choices, and the mean divergence of ours."""
    found = by_llama("complete", str(file), json.dumps(PROMPT), str(N_TOKENS), str(N_CHOICES))
    logits_NV = logits_after(file, found["tokens"])
    top_N2 = logits_NV.topk(2, -1).values
    ours_NV, divergence = logits_NV.log_softmax(-1), 0.0
    for n, likely in enumerate(found["likely"]):
        at = torch.tensor([int(token) for token in likely])
        theirs = torch.tensor(list(likely.values()))
        divergence += float((theirs.exp() * (theirs - ours_NV[n, at])).sum()) / N_TOKENS
    margin = float((top_N2[:, 0] - top_N2[:, 1]).min())
    return found["tokens"], logits_NV.argmax(-1).tolist(), margin, divergence


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_chooses_the_same_tokens(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    if name in OWN:
        folder = tmp_path / name
        write(folder, NEMOTRON_H.recipe(hybrid_override_pattern=OWN[name]))
    else:
        folder = checkpoint(name)
    theirs, ours, margin, divergence = compared(convert(folder, tmp_path / f"{name}.gguf"))
    print(f"{name}: margin {margin:.4f}, divergence {divergence:.2e}")
    assert margin > MIN_MARGIN
    assert theirs == ours
    assert abs(divergence) < 1e-4


@pytest.mark.parametrize("kind", ALL_FORMATS)
def test_file_of_llama_cpps_quantiser_has_its_next_tokens(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, file = convert(checkpoint("qwen3_5_blocks"), tmp_path / "plain.gguf"), tmp_path / f"{kind}.gguf"
    by_llama("quantise", str(plain), kind, str(file))
    _, _, margin, divergence = compared(file)
    print(f"{kind}: margin {margin:.4f}, divergence {divergence:.2e}")
    assert abs(divergence) < MAX_DIVERGENCE

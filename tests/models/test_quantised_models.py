"""Models from quantised checkpoints: logits, bits and memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.mixers.quantised import Quantised
from headwater.models.load import load_model
from headwater.models.quantisation import method_of
from headwater.models.tensors import CheckpointTensors
from tests.checkpoints.quantised import quantise
from tests.support import Bench

TOKENS = list(range(300, 400))


def logits(folder: Path) -> torch.Tensor:
    bench = Bench(load_model(folder, "float32").model)
    return bench.prefill(bench.sequence(len(TOKENS)), TOKENS)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(
    "case", ["gptq, 4 bits", "gptq, act order", "awq", "packed, 4 bits, asymmetric", "int8", "modelopt, nvfp4"]
)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_moe"])
def test_a_quantised_checkpoint_has_the_logits_of_its_values(
    name: str, case: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = Path(shutil.copytree(checkpoint(name), tmp_path / "plain"))
    quantised = quantise(plain, tmp_path / "quantised", case)
    edited = json.loads((quantised / "config.json").read_text())
    method = CheckpointTensors(quantised, torch.float32, torch.device("cpu"), method_of(edited))
    values = {name: method.raw(name, *tensor.shape) for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(values, plain / "model.safetensors")
    assert torch.equal(logits(quantised), logits(plain))


@pytest.mark.parametrize("case", ["fp8, blocks", "nf4", "fp4"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_moe"])
def test_checkpoint_of_floats_gives_the_bits_of_its_values(
    name: str, case: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """By kernels, which hold a byte a weight, or half of one: numbers times their scales, held in float32."""
    pytest.importorskip("numba", reason="numba is not installed")
    folder = quantise(checkpoint(name), tmp_path / "quantised", case)
    config = json.loads((folder / "config.json").read_text())
    tensors = CheckpointTensors(folder, torch.float32, torch.device("cpu"), method_of(config))
    plain = Path(shutil.copytree(checkpoint(name), tmp_path / "plain"))
    shapes = {name: tensor.shape for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file({name: tensors.raw(name, *shape) for name, shape in shapes.items()}, plain / "model.safetensors")
    logits = []
    for of in (folder, plain):
        bench = Bench(load_model(of, "float32").model)
        sequence = bench.sequence(len(TOKENS) + 4)
        of_prompt = bench.prefill(sequence, TOKENS)
        logits.append([of_prompt, *(bench.step([], [(sequence, token)]) for token in range(300, 304))])
    for of_codes, of_values in zip(*logits, strict=True):
        assert torch.equal(of_codes, of_values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_moe"])
def test_a_float8_checkpoint_is_held_in_a_byte_a_weight(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """No product, of experts neither, unpacks its weight as a whole: not at loading, and not for a prompt."""
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    from headwater.mixers.cpu import experts

    folder, made = quantise(checkpoint(name), tmp_path / "quantised", "fp8, blocks"), panels.held
    held = []

    def noted(weight: torch.Tensor | Quantised, of_rows: torch.dtype) -> Any:
        laid_out = made(weight, of_rows)
        if isinstance(weight, Quantised):
            held.append((weight.shape, laid_out.arrays[0].nbytes))
        return laid_out

    for module_ in (panels, experts):
        monkeypatch.setattr(module_, "held", noted)
    monkeypatch.setattr(Quantised, "values", lambda self: pytest.fail(f"a weight of {self.shape} is unpacked"))
    bench = Bench(load_model(folder, dtype).model)
    sequence = bench.sequence(len(TOKENS) + 1)
    bench.prefill(sequence, TOKENS)
    bench.step([], [(sequence, 300)])
    assert held
    for (n_out, n_in), n_bytes in held:
        assert n_bytes == -(-n_out // 64) * 64 * n_in

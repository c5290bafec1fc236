"""MLX folders: the logits of the checkpoints that they were converted from, and refusals."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.errors import CheckpointError
from headwater.mixers.quantised import Quantised
from headwater.models.families import read_config
from headwater.models.load import load_model, open_weights
from headwater.models.quantisation import Mlx
from tests.checkpoints.mlx import quantised, save, values, write
from tests.models.test_gguf_models import greedy

NAMES = (
    "qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_moe", "granite", "granite_moe",
    "nemotron_h", "nemotron_h_latent", "jamba_moe", "mamba", "falcon_mamba", "mamba2", "kimi_linear",
    "kimi_linear_groups", "ring", "ling", "ling_2_5", "gpt_oss", "gpt_oss_mxfp4",
)  # fmt: skip
ALL_BITS = (2, 3, 4, 5, 6, 8)
FORMS: dict[str, dict[str, object]] = {  # of what mlx-lm writes
    "plain": {},
    "4 bits": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "MXFP4": {"quantize": True, "q_mode": "mxfp4"},
}


@pytest.mark.parametrize("name", NAMES)
def test_mlx_folder_has_the_logits_of_its_checkpoint(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    expected, found = load_model(checkpoint(name)), load_model(write(checkpoint(name), tmp_path / "mlx"))
    (expected_V, tokens), (found_V, ours) = greedy(expected), greedy(found)
    assert torch.equal(found_V, expected_V)
    assert ours == tokens


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(
    "name", ["qwen3_5", "qwen3_5_moe", "granite", "granite_moe", "jamba_moe", "kimi_linear", "ring", "gpt_oss"]
)
@pytest.mark.parametrize("bits", [4, 6])
def test_quantised_mlx_folder_has_the_logits_of_its_values(
    name: str, bits: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Embedding and head included: a folder with the values in float32 has the same logits."""
    folder = write(checkpoint(name), tmp_path / "mlx", bits)
    same_values(folder, write(checkpoint(name), tmp_path / "plain"))
    assert load_model(folder).spec.weights_held == f"int{bits}"


def same_values(folder: Path, plain: Path) -> None:
    """Compare with the folder `plain`, whose tensors become the quantised ones' values."""
    parts, tensors = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    save({at: values(parts, at, tensor.shape[-1]) for at, tensor in tensors.items()}, plain)
    (expected_V, tokens), (found_V, ours) = greedy(load_model(plain)), greedy(load_model(folder))
    assert torch.equal(found_V, expected_V)
    assert ours == tokens


@pytest.mark.parametrize("bits", ALL_BITS)
def test_mlx_integers_of_all_bits_are_read_to_the_bit(bits: int) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(bits))
    parts = quantised("a.weight", weight, bits)
    found = Mlx().read({name.removeprefix("a."): part for name, part in parts.items()}, 24, 96)
    assert (found.bits, found.group) == (bits, 32)
    assert torch.equal(found.values(), values(parts, "a.weight", 96))


def test_stacked_experts_are_held_as_integers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write(checkpoint("qwen3_5_moe"), tmp_path / "mlx", 4)
    experts = open_weights(folder, "float32").stored("language_model.model.layers.0.mlp.experts.gate_proj", 8, 48, 64)
    assert [type(expert) for expert in experts] == [Quantised] * 8


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    save(change(load_file(folder / "model.safetensors")), folder)
    return folder


def test_convolution_in_another_order_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Its place of size 1 tells whether norms hold w or 1 + w."""
    plain = checkpoint("qwen3_5_tied")
    unnamed = write(plain, tmp_path / "unnamed")
    save_file(load_file(unnamed / "model.safetensors"), unnamed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"conv1d.weight' has shape \[\d+, \d+, 1\], .* the order of MLX, whose"):
        load_model(unnamed)
    named = edited(Path(shutil.copytree(plain, tmp_path / "named")), dict)
    with pytest.raises(
        CheckpointError, match=r"conv1d.weight' has shape \[\d+, 1, \d+\], MLX has \[channels, taps, 1\]"
    ):
        load_model(named)


@pytest.mark.parametrize("name", ["falcon_h1", "bamba", "minimax"])
def test_mlx_folder_of_another_family_is_refused_by_name(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(Path(shutil.copytree(checkpoint(name), tmp_path / name)), dict)
    with pytest.raises(CheckpointError, match=f"MLX folders of model_type '{name}' are not read, only of qwen3_5"):
        load_model(folder)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mode_of_mlx_that_is_not_read_is_refused_before_weights(
    mode: str, key: str, checkpoint: Callable[[str], Path]
) -> None:
    config = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    of_all = {"group_size": 32, "bits": 4}
    for described in (of_all | {"mode": mode}, of_all | {"model.layers.0.mlp.down_proj": of_all | {"mode": mode}}):
        with pytest.raises(CheckpointError, match=f"MLX's mode '{mode}' are not read; take a folder .*'affine'"):
            read_config(config | {key: described}, "float32")
    read_config(config | {key: of_all | {"model.layers.0.mlp.down_proj": False}}, "float32")


def test_words_that_are_not_of_whole_integers_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write(checkpoint("qwen3"), tmp_path / "mlx", 4)
    at = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(CheckpointError, match=rf"quantised weight '{at}', .*: weight has shape \[\d+, 7\], must be"):
        load_model(edited(folder, lambda tensors: tensors | {at: tensors[at][:, :7]}))


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.peers
@pytest.mark.skipif(not os.environ.get("VENV_MLX"), reason="VENV_MLX names no environment with mlx-lm")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *product(("qwen3_5", "nemotron_h", "jamba_moe", "ring", "ling_2_5", "mamba"), ("plain", "4 bits")),
        ("qwen3_5", "MXFP4"),
        ("gpt_oss_mxfp4", "plain"),
    ],
)
def test_folder_that_mlx_lm_wrote_is_that_of_our_writer(
    name: str, form: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Quantised ones have other integers than our writer's, so that their own values are compared."""
    settings = FORMS[form]
    plain = Path(shutil.copytree(checkpoint(name), tmp_path / "plain"))
    config = json.loads((plain / "config.json").read_text())
    if name == "qwen3_5":
        of_text = config | {"full_attention_interval": config["layer_types"].index("full_attention") + 1}
        (plain / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": of_text}))
    call = f"from mlx_lm.convert import convert; convert({str(plain)!r}, {str(tmp_path / 'theirs')!r}, **{settings!r})"
    subprocess.run([f"{os.environ['VENV_MLX']}/bin/python", "-c", call], check=True, capture_output=True)
    ours = write(checkpoint(name), tmp_path / "ours")
    if settings:
        return same_values(tmp_path / "theirs", ours)
    theirs, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", ours))
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[at], tensor) for at, tensor in expected.items())

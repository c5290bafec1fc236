"""gpt-oss as published, with experts in MXFP4, against transformers; controls of sinks and limits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater import kernels
from headwater.layers.feed_forward import Experts
from headwater.mixers.weights import values_of
from headwater.models.load import load_model, open_weights, read_spec
from headwater.models.tensors import PartTensors
from tests.support import Bench

TOKENS = list(range(300, 440))


def bench_of(folder: Path) -> Bench:
    return Bench(load_model(folder, "float32").model)


def of_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


def test_experts_in_mxfp4_have_the_values_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("gpt_oss_mxfp4")
    spec, theirs = read_spec(folder, "float32"), of_transformers(folder).state_dict()
    part = next(part for part in spec.parts if isinstance(part.layer, Experts))
    at = f"model.{part.at}."
    found = PartTensors(open_weights(folder, "float32"), at, part.layer.tensors(), part.names, part.interleaved)
    both = theirs[f"{at}experts.gate_up_proj"].transpose(1, 2)
    wanted = {"gate": both[:, 0::2], "up": both[:, 1::2], "down": theirs[f"{at}experts.down_proj"].transpose(1, 2)}
    for name, weight in wanted.items():
        assert torch.equal(values_of(found[f"experts.{name}_proj.weight"]), weight), name
    biases = theirs[f"{at}experts.gate_up_proj_bias"]
    assert torch.equal(values_of(found["experts.up_proj.bias"]), biases[:, 1::2].bfloat16())


@pytest.mark.parametrize("has_kernels", [False, True])
def test_model_in_mxfp4_has_the_logits_of_transformers(
    has_kernels: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels round rows of products with 4 bits to 8, as all with integers; a rounding may choose another expert."""
    if not has_kernels:
        monkeypatch.setattr(kernels, "available", lambda: False)
    folder = checkpoint("gpt_oss_mxfp4")
    bench = bench_of(folder)
    found = bench.prefill(bench.sequence(len(TOKENS)), TOKENS)
    with torch.no_grad():
        wanted = of_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    error_N = (found - wanted).abs().amax(-1)
    if not has_kernels:
        assert error_N.max() < 1e-4
    assert error_N.median() < 0.02 * wanted.abs().max()
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9


def test_costs_count_only_experts_in_4_bits(checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(checkpoint("gpt_oss_mxfp4"), "bfloat16")
    stored = load_file(checkpoint("gpt_oss_mxfp4") / "model.safetensors")
    in_4_bits = [tensor.numel() for name, tensor in stored.items() if name.endswith("_blocks")]
    others = sum(tensor.nbytes for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales")))
    assert spec.weights_held == "mxfp4"
    assert spec.weight_bytes == others + sum(n + n // 8 for n in in_4_bits)  # a scale is held in 2 bytes


@pytest.mark.parametrize("part", ["sinks", "limit"])
def test_logits_depend_on_sinks_and_limits(part: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The control of the oracle."""
    whole = checkpoint("gpt_oss")
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    if part == "limit":
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"swiglu_limit": 100.0}))
    else:
        stored = load_file(other / "model.safetensors")
        without = {name: weight - 1e4 * name.endswith("sinks") for name, weight in stored.items()}
        save_file(without, other / "model.safetensors")
    found, changed = (bench.prefill(bench.sequence(len(TOKENS)), TOKENS) for bench in map(bench_of, (whole, other)))
    assert (found - changed).abs().max() > 0.05

"""Quantised weights in Hugging Face checkpoints: each method against its packing, written out with numpy."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headwater.errors import CheckpointError
from headwater.layers.feed_forward import Experts, Mlp
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import values_of
from headwater.models.families import quantised as described
from headwater.models.families import read_config
from headwater.models.files import model_config
from headwater.models.profiles import profile_named
from headwater.models.quantisation import METHODS, method_of
from headwater.models.tensors import CheckpointTensors, PartTensors
from tests.checkpoints.quantised import (
    BNB,
    CASES,
    FP8,
    GROUP,
    Parts,
    Weight,
    awq,
    blocks,
    bnb_int8,
    compressed,
    float8,
    gpt_oss,
    gptq,
    gptq_in_act_order,
    int8,
    mlx,
    modelopt,
    module,
    mxfp8,
    nf4,
    nvfp4,
    packed,
)
from tests.test_spec import NEXT_80B

N, K = 32, 64
TOKENS = list(range(300, 400))

HELD: dict[str, tuple[dict[str, Any], Callable[[int, int], tuple[Parts, Weight]], str]] = {
    "gptq, 4 bits": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq, "int4"),
    "gptq, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        lambda n, k: gptq(n, k, 8),
        "int8",
    ),
    "gptq, 3 bits in act order": (
        {"quant_method": "gptq", "bits": 3, "group_size": GROUP, "desc_act": True},
        lambda n, k: gptq_in_act_order(n, k, 3),
        "int3",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq, "int4"),
    "mlx": ({"bits": 4, "group_size": GROUP}, mlx, "int4"),
    "packed, asymmetric": (
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
        packed,
        "int4",
    ),
    "packed, symmetric": (
        compressed("pack-quantized", num_bits=4, group_size=GROUP),
        lambda n, k: packed(n, k, symmetric=True),
        "int4",
    ),
    "int8": (compressed("int-quantized", num_bits=8, group_size=None), int8, "int8"),
    "fp8, blocks": (FP8, lambda n, k: float8(n, k, (-(-n // 128), -(-k // 128)), "weight_scale_inv"), "float8"),
    "fp8, a scale for all": (
        FP8 | {"weight_block_size": None},
        lambda n, k: float8(n, k, (1,), "weight_scale"),
        "float8",
    ),
    "float8, a scale an output": (
        compressed("float-quantized", num_bits=8, type="float"),
        lambda n, k: float8(n, k, (n, 1), "weight_scale"),
        "float8",
    ),
    "modelopt, nvfp4": (
        modelopt("NVFP4", group_size=16),
        lambda n, k: nvfp4(n, k, reciprocal=False),
        "nvfp4",
    ),
    "nvfp4 of compressed-tensors": (*CASES["nvfp4 of compressed-tensors"], "nvfp4"),
    "mxfp4 of compressed-tensors": (*CASES["mxfp4 of compressed-tensors"], "mxfp4"),
    "mxfp8 of compressed-tensors": (*CASES["mxfp8 of compressed-tensors"], "float8"),
    "modelopt, fp8": (*CASES["modelopt, fp8"], "float8"),
    "int8 of bitsandbytes": (*CASES["int8 of bitsandbytes"], "int8"),
    "float8, blocks of compressed-tensors": (CASES["float8, blocks of compressed-tensors"][0], blocks, "float8"),
}


@pytest.mark.parametrize("case", HELD)
def test_bytes_are_counted_as_weights_are_held(case: str) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    described_as, write, name = HELD[case]
    config = {"quantization_config": described_as}
    method, n, k = method_of(config), 64, 1024
    assert method is not None
    arrays = panels.held(method.read(write(n, k)[0], n, k), torch.float32).arrays
    held = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    counted = described.packed(config, "float16")
    assert counted is not None
    assert counted.name == name
    assert counted.element_bytes * n * k == pytest.approx(held, rel=0.01)
    spec = read_config(NEXT_80B | config, "float32")
    plain = read_config(NEXT_80B, "float32")
    assert spec.packed is not None
    spec = replace(spec, packed=spec.packed._replace(table_bytes=None))  # embedding and head, which MLX quantises
    products = sum(layer.quantised_weights for layer in spec.layers)
    element_bytes = described.packed(config, spec.stored_dtype).element_bytes
    assert spec.weights_held == name
    assert spec.weight_bytes == pytest.approx(
        plain.weight_bytes - products * (plain.weight_element_bytes - element_bytes), abs=len(spec.layers)
    )
    assert spec.weight_bytes_read(1) < plain.weight_bytes_read(1)
    assert profile_named("a profile", "", spec).weight_bytes == spec.weight_bytes
    assert (spec.page_bytes, spec.checkpoint_bytes) == (plain.page_bytes, plain.checkpoint_bytes)


def test_float8_needs_a_byte_and_scales_in_any_compute_dtype() -> None:
    for dtype in ("float32", "bfloat16"):
        assert read_config(NEXT_80B | {"quantization_config": FP8}, dtype).packed == (
            "float8",
            1 + 4 / 128,
            None,
            False,
        )


def opened(folder: Path, tensors: Parts, config: dict[str, Any]) -> CheckpointTensors:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    method = method_of({"quantization_config": config})
    return CheckpointTensors(folder, torch.float32, torch.device("cpu"), method)


def test_accepted_config_has_a_reader() -> None:
    assert list(METHODS) == list(described.METHODS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(N, K), (160, 192)])
def test_values_are_those_of_the_format_to_the_bit(case: str, shape: tuple[int, int], tmp_path: Path) -> None:
    config, write = CASES[case]
    parts, weight = write(*shape)
    tensors = opened(tmp_path, module("proj", parts) | {"other.weight": torch.ones(3)}, config)
    assert "proj.weight" in tensors
    found = tensors.stored("proj.weight", *shape)
    assert isinstance(found, Quantised)
    assert torch.equal(found.values(), torch.from_numpy(weight))
    assert torch.equal(tensors.raw("proj.weight", *shape), torch.from_numpy(weight))
    assert tensors.unread() == ["other.weight"]


@pytest.mark.parametrize("case", CASES)
def test_module_left_in_16_bits_is_read_unchanged(case: str, tmp_path: Path) -> None:
    config, write = CASES[case]
    plain = torch.randn(N, K).bfloat16()
    tensors = opened(tmp_path, module("proj", write(N, K)[0]) | {"gate.weight": plain}, config)
    assert torch.equal(tensors.raw("gate.weight", N, K), plain)


def test_a_last_block_that_is_smaller_has_its_own_scale(tmp_path: Path) -> None:
    parts, weight = float8(200, 192, (2, 2), "weight_scale_inv")
    found = opened(tmp_path, module("proj", parts), FP8).stored("proj.weight", 200, 192)
    assert isinstance(found, Quantised)
    assert found.group == 64
    assert torch.equal(found.values(), torch.from_numpy(weight))


@pytest.mark.parametrize("case", CASES)
def test_a_joined_tensor_is_cut(case: str, tmp_path: Path) -> None:
    config, write = CASES[case]
    parts, weight = write(2 * N, K)
    tensors = opened(tmp_path, module("here.gate_up_proj", parts), config)
    found = PartTensors(tensors, "here.", Mlp(K, N).tensors())
    assert torch.equal(values_of(found["gate_proj.weight"]), torch.from_numpy(weight[:N]))
    assert torch.equal(values_of(found["up_proj.weight"]), torch.from_numpy(weight[N:]))


@pytest.mark.parametrize("case", CASES)
def test_experts_are_quantised_one_by_one(case: str, tmp_path: Path) -> None:
    config, write = CASES[case]
    written = {e: write(N, K) for e in range(3)}
    stored: Parts = {}
    for e, (parts, _) in written.items():
        stored |= module(f"here.experts.{e}.gate_proj", parts)
    tensors = opened(tmp_path, stored, config)
    found = PartTensors(tensors, "here.", Experts(K, experts=3, per_token=2, intermediate=N).tensors())
    experts = found["experts.gate_proj.weight"]
    assert isinstance(experts, list)
    for e, (_, weight) in written.items():
        assert torch.equal(experts[e].values(), torch.from_numpy(weight))
    assert torch.equal(values_of(experts)[1], torch.from_numpy(written[1][1]))


def halves(n: int, k: int, seed: int) -> tuple[Parts, Weight]:
    """A scale for gate and one for up."""
    (gate, weight), (up, other) = (float8(n // 2, k, (1, 1), "weight_scale_inv", seed=seed + half) for half in (0, 1))
    return {name: torch.cat([gate[name], up[name]]) for name in gate}, np.concatenate([weight, other])


STACKED: dict[str, tuple[dict[str, Any], Callable[[int, int, int], tuple[Parts, Weight]]]] = {
    "fp8, blocks": (FP8, lambda n, k, seed: float8(n, k, (1, 1), "weight_scale_inv", seed=seed)),
    "fp8, halves": (FP8, lambda n, k, seed: halves(n, k, seed)),
    "nvfp4": (modelopt("NVFP4"), lambda n, k, seed: nvfp4(n, k, False, seed)),
    "mxfp4 of gpt-oss": ({"quant_method": "mxfp4"}, gpt_oss),
}


@pytest.mark.parametrize("case", STACKED)
def test_stacked_experts_are_quantised(case: str, tmp_path: Path) -> None:
    """As transformers and gpt-oss write them: names of a tensor of all experts, and gate and up as one."""
    config, write = STACKED[case]
    sizes = {"gate_up_proj": (2 * N, K), "down_proj": (K, N)}
    written = {name: [write(*size, seed) for seed in range(3)] for name, size in sizes.items()}
    stored: Parts = {}
    for name, experts in written.items():
        for part in experts[0][0]:
            suffix = "" if part == "weight" else "_" + part.removeprefix("weight_")
            stored[f"here.experts.{name}{suffix}"] = torch.stack([parts[part] for parts, _ in experts])
    tensors = opened(tmp_path, stored, config)
    interleaved = write is gpt_oss
    found = PartTensors(
        tensors, "here.", Experts(K, experts=3, per_token=2, intermediate=N).tensors(), interleaved=interleaved
    )
    up, down = found["experts.up_proj.weight"], found["experts.down_proj.weight"]
    assert isinstance(up, list)
    for e in range(3):
        assert torch.equal(
            up[e].values(),
            torch.from_numpy(written["gate_up_proj"][e][1][slice(1, None, 2) if interleaved else slice(N, None)]),
        )
    assert torch.equal(values_of(down)[1], torch.from_numpy(written["down_proj"][1][1]))
    shapes = Experts(K, experts=4, per_token=2, intermediate=N).tensors()
    with pytest.raises(CheckpointError, match=r"down_proj.* has shape \[3, .* must be of 4 experts"):
        PartTensors(tensors, "here.", shapes)["experts.down_proj.weight"]


def with_part(part: str, tensor: torch.Tensor, write: Callable[..., tuple[Parts, Weight]] = gptq) -> Parts:
    return write(N, K)[0] | {part: tensor}


def nvfp4_of_modelopt(n: int, k: int) -> tuple[Parts, Weight]:
    return nvfp4(n, k, reciprocal=False)


def float8_of_one_scale(n: int, k: int) -> tuple[Parts, Weight]:
    return float8(n, k, (1,), "weight_scale")


@pytest.mark.parametrize(
    ("config", "parts", "error"),
    [
        ("gptq, 4 bits", with_part("qweight", torch.zeros(8, 16, dtype=torch.int32)), r"\[8, 16\], must be \[8, 32\]"),
        ("gptq, 4 bits", with_part("qweight", torch.zeros(7, N, dtype=torch.int32)), "7 words for 64 .* 3.5 bits"),
        ("gptq, 4 bits", with_part("g_idx", torch.zeros(K)), "g_idx does not have 16 inputs for each of 4 groups"),
        ("gptq, 4 bits", with_part("g_idx", torch.zeros(8)), r"g_idx has shape \[8\], must be \[64\]"),
        ("awq", with_part("qzeros", torch.zeros(4, 2, dtype=torch.int32), awq), r"qzeros .*\[4, 2\], must be \[4, 4\]"),
        ("packed, 4 bits, symmetric", packed(16, K)[0], r"weight_scale .*\[16, 4\], must be \[32, 4\]"),
        ("fp8, blocks", float8(N, K, (2, 2), "weight_scale_inv", 32)[0], r"\[2, 2\], must be \[1, 1\]"),
        (
            "fp8, blocks",
            with_part("weight", torch.full((N, K), torch.nan).to(torch.float8_e4m3fn), float8_of_one_scale),
            "weight has 2,048 numbers that are NaN, of 2,048",
        ),
        (
            "modelopt, nvfp4",
            with_part("weight_scale", torch.zeros(N, 3), nvfp4_of_modelopt),
            "scale is of torch.float32",
        ),
        (
            "modelopt, nvfp4",
            with_part("pre_quant_scale", torch.ones(K), nvfp4_of_modelopt),
            "pre_quant_scale, a factor",
        ),
        (
            "modelopt, mxfp8",
            with_part("weight_scale", torch.full((N, 2), 255, dtype=torch.uint8), mxfp8),
            "scale is NaN",
        ),
        (
            "nf4",
            with_part("weight.quant_map", torch.zeros(16), nf4),
            "has other numbers than nf4 and fp4; take",
        ),
        ("nf4", with_part("weight.absmax", torch.zeros(3), nf4), r"absmax has shape \[3\], must be \[64\]"),
        (
            "int8 of bitsandbytes",
            with_part("weight_format", torch.tensor(2), bnb_int8),
            "weight_format is 2, must be 0",
        ),
        ("fp8, blocks", {"weight": torch.zeros(N, K), "weight_scale": torch.ones(1)}, "torch.float32, must be of"),
        (
            "packed, 4 bits, symmetric",
            with_part("weight_packed", packed(N, K)[0]["weight_packed"].long(), packed),
            "32 by 128 integers are packed in weight_packed of torch.int64",
        ),
    ],
)
def test_error_names_the_defect_of_a_quantised_weight(config: str, parts: Parts, error: str, tmp_path: Path) -> None:
    tensors = opened(tmp_path, module("proj", parts), CASES[config][0])
    with pytest.raises(CheckpointError, match=rf"model.safetensors: .*'proj.weight', 32 by 64: .*{error}"):
        tensors.raw("proj.weight", N, K)


def test_blocks_that_cross_rows_are_refused_with_their_size(tmp_path: Path) -> None:
    tensors = opened(tmp_path, module("proj", nf4(48, 16)[0]), BNB)
    with pytest.raises(CheckpointError, match=r"'proj.weight', 48 by 16: nf4 has blocks of 32 .* rows of 16; take"):
        tensors.raw("proj.weight", 48, 16)


def test_formats_of_modules_are_mixed_as_their_tensors_say(tmp_path: Path) -> None:
    """As in MIXED_PRECISION of ModelOpt; a file of its own describes it, not config.json."""
    (first, weight), (second, other) = nvfp4_of_modelopt(N, K), float8(N, K, (), "weight_scale")
    names = {
        "a.mlp.experts": "NVFP4",
        "b": "FP8",
        "c": "fp8",
        "d": "UNQUANTIZED",
    }  # experts, of any number, by one name
    layers = {name: {"quant_algo": algorithm} for name, algorithm in names.items()}
    file = {"producer": {}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    config = model_config(tmp_path)
    tensors = opened(tmp_path, module("a", first) | module("c", second), config["quantization_config"])
    assert torch.equal(tensors.raw("a.weight", N, K), torch.from_numpy(weight))
    assert torch.equal(tensors.raw("c.weight", N, K), torch.from_numpy(other))
    assert described.packed(config, "bfloat16") == ("nvfp4", 0.625, None, False)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = gptq(N, K)[0]
    del parts["scales"]
    tensors = opened(tmp_path, module("proj", parts), CASES["gptq, 4 bits"][0])
    with pytest.raises(CheckpointError, match=r"tensor 'proj\.scales' is missing"):
        tensors.raw("proj.weight", N, K)


REFUSED = {
    "quark": (
        {"quant_method": "quark"},
        "'quark' are not one of awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8",
    ),
    "packing of auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:gptq"},
        "'packing_format' is 'auto_round:gptq', must be one of auto_round:auto_gptq, auto_round:auto_awq",
    ),
    "awq of modelopt": (modelopt("NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' is not read; take .* NVFP4 or FP8"),
    "one module of modelopt": (
        modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ"}}),
        "quant_algo 'W4A16_AWQ' is not read",
    ),
    "no method": ({"bits": 4}, "None are not one of"),
    "5 bits": ({"quant_method": "gptq", "bits": 5}, "'bits' is 5"),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
    "gemv": ({"quant_method": "awq", "version": "GEMV"}, "'version' is 'gemv', only 'gemm'"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "'fmt' is 'e5m2', only 'e4m3'"),
    "three sizes": (FP8 | {"weight_block_size": [1, 2, 3]}, "'weight_block_size' is .*two sizes"),
    "floats of 6 bits": (compressed("mxfp6-pack-quantized", num_bits=6, type="float"), "'format' is 'mxfp6-pack-"),
    "another group": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=64),
        "4 bits of type 'float', must be .* groups of 16 or 32",
    ),
    "rotated": (compressed("pack-quantized", num_bits=4) | {"transform_config": {"a": 1}}, "'transform_config'"),
    "sparse": (compressed("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "24"}}, "'sparsity_config'"),
    "2 bits": (compressed("pack-quantized", num_bits=2), "2 bits of type 'int'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_quantisation_is_refused_with_nearest_form_before_any_weight(
    case: str, checkpoint: Callable[[str], Path]
) -> None:
    changes, named = REFUSED[case]
    error = f"(?=.*; take ).*{named}"
    config = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    with pytest.raises(CheckpointError, match=error):
        read_config(config | {"quantization_config": changes}, "float32")
    with pytest.raises(CheckpointError, match=error):
        read_config({"text_config": config, "quantization_config": changes}, "float32")

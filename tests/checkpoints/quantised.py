"""Quantised weights in Hugging Face checkpoints: the packing of each method, written out with numpy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 16
BLOCK = 32  # inputs of groups in MXFP4 and MXFP8, and of blocks in nf4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each place of a word, from the lowest bits
Parts = dict[str, torch.Tensor]
Weight = np.ndarray  # float32 [N, K]


def integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape)


def scales(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.001, 0.1, shape).astype(np.float16)


def words(integers_RC: np.ndarray, bits: int) -> torch.Tensor:
    """Bits of a row's integers one after the other, the lowest first, in words of 32 bits; zeros fill the last word."""
    bit_RB = ((integers_RC[:, :, None] >> np.arange(bits)) & 1).reshape(len(integers_RC), -1)
    byte_RB = np.packbits(np.pad(bit_RB, ((0, 0), (0, -bit_RB.shape[1] % 32))), 1, "little")
    return torch.from_numpy(byte_RB.view(np.int32))


def spread(groups_NX: np.ndarray, n_in: int) -> np.ndarray:
    return groups_NX.repeat(n_in // groups_NX.shape[1], 1)


def affine(code: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> Weight:
    n_in = code.shape[1]
    difference = (code - spread(zero, n_in)).astype(np.float32)
    return difference * spread(scale.astype(np.float32), n_in)


def gptq(
    n: int, k: int, bits: int = 4, less: int = 1, seed: int = 0, group_K: np.ndarray | None = None
) -> tuple[Parts, Weight]:
    groups = k // GROUP
    group_K = np.arange(k, dtype=np.int32) // GROUP if group_K is None else group_K
    code, zero = integers(seed, 0, 2**bits, n, k), integers(seed + 1, 1, 2**bits, n, groups)
    scale = scales(seed + 2, n, groups)
    parts = {
        "qweight": words(code, bits).T.contiguous(),
        "qzeros": words(zero.T - less, bits),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.from_numpy(group_K),
    }
    return parts, (code - zero[:, group_K]).astype(np.float32) * scale.astype(np.float32)[:, group_K]


def gptq_in_act_order(n: int, k: int, bits: int = 4, seed: int = 0) -> tuple[Parts, Weight]:
    """Groups of inputs that were sorted by a measure which all weights with these inputs share."""
    order_K = np.random.default_rng(k).permutation(k).astype(np.int32)
    return gptq(n, k, bits, seed=seed, group_K=order_K // GROUP)


def awq(n: int, k: int, seed: int = 0) -> tuple[Parts, Weight]:
    code, zero = integers(seed, 0, 16, n, k), integers(seed + 1, 0, 16, n, k // GROUP)
    scale = scales(seed + 2, n, k // GROUP)

    def interleaved(rows: np.ndarray) -> torch.Tensor:
        return words(rows.reshape(len(rows), -1, 8)[:, :, AWQ_ORDER].reshape(rows.shape), 4)

    parts = {"qweight": interleaved(code.T), "qzeros": interleaved(zero.T), "scales": torch.from_numpy(scale.T.copy())}
    return parts, affine(code, zero, scale)


def packed(n: int, k: int, bits: int = 4, symmetric: bool = False, group: int = GROUP, seed: int = 0):
    half = 2 ** (bits - 1)
    code, zero = integers(seed, -half, half, n, k), integers(seed + 1, -half, half, n, k // group)
    scale = scales(seed + 2, n, k // group)
    parts = {
        "weight_packed": words(code + half, bits),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor([n, k]),
    }
    if symmetric:
        zero = np.zeros_like(zero)
    else:
        parts["weight_zero_point"] = words(zero.T + half, bits).T.contiguous()
    return parts, affine(code, zero, scale)


def packed_in_act_order(n: int, k: int) -> tuple[Parts, Weight]:
    """The tensors of GPTQ in act order as compressed-tensors packs them."""
    theirs, weight = gptq_in_act_order(n, k)
    zero = integers(1, 1, 16, n, k // GROUP)  # those of `gptq`, which stores them less 1
    parts = {
        "weight_packed": theirs["qweight"].T.contiguous(),
        "weight_scale": theirs["scales"].T.contiguous(),
        "weight_zero_point": words(zero.T, 4).T.contiguous(),
        "weight_g_idx": theirs["g_idx"],
    }
    return parts, weight


def with_unused_order(parts: Parts, weight: Weight) -> tuple[Parts, Weight]:
    return parts | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, weight


def int8(n: int, k: int, seed: int = 0) -> tuple[Parts, Weight]:
    code, scale = integers(seed, -128, 128, n, k), scales(seed + 1, n, 1)
    parts = {"weight": torch.from_numpy(code.astype(np.int8)), "weight_scale": torch.from_numpy(scale).bfloat16()}
    return parts, affine(code, np.zeros((n, 1), int), parts["weight_scale"].float().numpy())


def float8(n: int, k: int, scale_shape: tuple[int, ...], name: str, block: int = 128, seed: int = 0):
    code = torch.from_numpy(integers(seed, 0, 127, n, k).astype(np.uint8)).view(torch.float8_e4m3fn)
    scale = scales(seed + 1, *scale_shape).astype(np.float32)
    rows, columns = np.arange(n) // block, np.arange(k) // block
    spread_NK = scale[rows][:, columns] if len(scale_shape) == 2 and scale_shape[0] != n else scale.reshape(-1, 1)
    parts = {"weight": code, name: torch.as_tensor(scale)}
    return parts, code.float().numpy() * spread_NK


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


FP4 = np.float32([0, 1 / 16, 8, 12, 4, 6, 2, 3, 0, -1 / 16, -8, -12, -4, -6, -2, -3]) / np.float32(12)


def pairs(code_NK: np.ndarray) -> torch.Tensor:
    """Codes of 4 bits, two a byte, the first in the lower bits."""
    return torch.from_numpy((code_NK[:, 0::2] | code_NK[:, 1::2] << 4).astype(np.uint8))


def e4m3(seed: int, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    """Positive float8 numbers, and their values."""
    stored = torch.from_numpy(integers(seed, 1, 0x7F, *shape).astype(np.uint8)).view(torch.float8_e4m3fn)
    return stored, stored.float().numpy()


def e8m0(seed: int, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    """Exponents of powers of two, plus 127, and the powers."""
    exponent = integers(seed, 100, 130, *shape)
    return torch.from_numpy(exponent.astype(np.uint8)), np.ldexp(np.float32(1), exponent - 127).astype(np.float32)


def nvfp4(n: int, k: int, reciprocal: bool, seed: int = 0) -> tuple[Parts, Weight]:
    """NVFP4 of ModelOpt, or of compressed-tensors, which stores the reciprocal of the scale of the whole weight."""
    code = integers(seed, 0, 16, n, k)
    (scale, scale_NX), outer = e4m3(seed + 1, n, k // 16), scales(seed + 2, 1).astype(np.float32)
    if reciprocal:
        parts = {"weight_packed": pairs(code), "weight_global_scale": torch.from_numpy(outer)}
        outer = np.float32(1) / outer
    else:
        parts = {"weight": pairs(code), "weight_scale_2": torch.from_numpy(outer)[0]}
        parts["input_scale"] = torch.tensor(0.5)
    return parts | {"weight_scale": scale}, E2M1[code] * spread(scale_NX * outer, k)


def mxfp4(n: int, k: int, name: str = "weight_packed", seed: int = 0) -> tuple[Parts, Weight]:
    code, (scale, scale_NX) = integers(seed, 0, 16, n, k), e8m0(seed + 1, n, k // BLOCK)
    return {name: pairs(code), "weight_scale": scale}, E2M1[code] * spread(scale_NX, k)


def gpt_oss(n: int, k: int, seed: int = 0) -> tuple[Parts, Weight]:
    parts, weight = mxfp4(n, k, "blocks", seed)
    return {"blocks": parts["blocks"].view(n, k // BLOCK, 16), "scales": parts["weight_scale"]}, weight


def mxfp8(n: int, k: int, seed: int = 0) -> tuple[Parts, Weight]:
    (code, number_NK), (scale, scale_NX) = e4m3(seed, n, k), e8m0(seed + 1, n, k // BLOCK)
    return {"weight": code, "weight_scale": scale}, number_NK * spread(scale_NX, k)


def nf4(n: int, k: int, nested: bool = False, kind: str = "nf4", seed: int = 0) -> tuple[Parts, Weight]:
    """nf4 or fp4 of bitsandbytes, in blocks of the flattened weight; scales in float32, or bytes with scales of 16."""
    code, block = integers(seed, 0, 16, n, k), BLOCK
    table = {"nf4": NF4, "fp4": FP4}[kind]
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    scale_M = scales(seed + 1, n * k // block).astype(np.float32)
    parts = {"weight.absmax": torch.from_numpy(scale_M), "weight.quant_map": torch.tensor(table)}
    if nested:
        byte_M, map_256 = integers(seed + 1, 0, 256, len(scale_M)).astype(np.uint8), scales(seed + 2, 256)
        outer = scales(seed + 3, -(-len(byte_M) // 16)).astype(np.float32)
        map_256, offset = map_256.astype(np.float32), 0.0371
        scale_M = map_256[byte_M] * outer.repeat(16)[: len(byte_M)] + np.float32(offset)
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {"absmax": byte_M, "nested_absmax": outer, "nested_quant_map": map_256}
        parts |= {f"weight.{name}": torch.from_numpy(array) for name, array in tensors.items()}
    text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    parts["weight"] = pairs(code.reshape(-1, 2)[:, ::-1])  # the first in the upper bits; [N · K / 2, 1]
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return parts, (table[code].reshape(-1, block) * scale_M[:, None]).reshape(n, k)


def bnb_int8(n: int, k: int, seed: int = 0) -> tuple[Parts, Weight]:
    code, largest_N = integers(seed, -127, 128, n, k), scales(seed + 1, n).astype(np.float32)
    parts = {"weight": torch.from_numpy(code.astype(np.int8)), "SCB": torch.from_numpy(largest_N)}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, code.astype(np.float32) * (largest_N / np.float32(127))[:, None]


def modelopt(algorithm: str, **keys: object) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **keys}


def mlx(n: int, k: int, bits: int = 4, seed: int = 0) -> tuple[Parts, Weight]:
    """Words of integers of 2, 4 or 8 bits; a bias for each group instead of a zero."""
    code, scale = integers(seed, 0, 2**bits, n, k), scales(seed + 1, n, k // GROUP)
    bias = -scales(seed + 2, n, k // GROUP)
    parts = {
        "weight": words(code, bits).view(torch.uint32),
        "scales": torch.from_numpy(scale),
        "biases": torch.from_numpy(bias),
    }
    return parts, affine(code, np.zeros_like(scale, int), scale) + spread(bias.astype(np.float32), k)


def compressed(kind: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], tuple[Parts, Weight]]]] = {
    "gptq, 4 bits": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda n, k: gptq(n, k, 8)),
    "gptq, 2 bits": ({"quant_method": "gptq", "bits": 2}, lambda n, k: gptq(n, k, 2)),
    "gptq, 3 bits": ({"quant_method": "gptq", "bits": 3}, lambda n, k: gptq(n, k, 3)),
    "gptq, act order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq_in_act_order),
    "gptq, 3 bits in act order": (
        {"quant_method": "gptq", "bits": 3, "desc_act": True},
        lambda n, k: gptq_in_act_order(n, k, 3),
    ),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}, gptq),
    "auto-round, awq": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, awq),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda n, k: gptq(n, k, less=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "mlx": ({"bits": 4, "group_size": GROUP, "mode": "affine"}, mlx),
    "packed, 4 bits, asymmetric": (compressed("pack-quantized", num_bits=4), packed),
    "packed, 4 bits, symmetric": (compressed("pack-quantized", num_bits=4), lambda n, k: packed(n, k, symmetric=True)),
    "packed, act order": (compressed("pack-quantized", num_bits=4, actorder="group"), packed_in_act_order),
    "packed, act order unused": (
        compressed("pack-quantized", num_bits=4),
        lambda n, k: with_unused_order(*packed(n, k)),
    ),
    "packed, 8 bits, a group an output": (
        compressed("pack-quantized", num_bits=8),
        lambda n, k: packed(n, k, 8, group=k),
    ),
    "int8": (compressed("int-quantized", num_bits=8), int8),
    "float8, a scale an output": (
        compressed("float-quantized", num_bits=8, type="float"),
        lambda n, k: float8(n, k, (n, 1), "weight_scale"),
    ),
    "float8, blocks of compressed-tensors": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
        lambda n, k: blocks(n, k),
    ),
    "fp8, blocks": (FP8, lambda n, k: float8(n, k, (-(-n // 128), -(-k // 128)), "weight_scale_inv")),
    "fp8, powers of two": (FP8, lambda n, k: with_powers(n, k)),
    "fp8, a scale for all": (FP8, lambda n, k: float8(n, k, (1,), "weight_scale")),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, lambda n, k: float8(n, k, (n, 1), "weight_scale")),
    "modelopt, fp8": (modelopt("FP8"), lambda n, k: float8(n, k, (), "weight_scale")),
    "modelopt, fp8 of outputs": (
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        lambda n, k: float8(n, k, (n,), "weight_scale"),
    ),
    "modelopt, fp8 of blocks": (
        modelopt("FP8_PB_WO"),
        lambda n, k: float8(n, k, (-(-n // 128), -(-k // 128)), "weight_scale"),
    ),
    "modelopt, nvfp4": (modelopt("NVFP4", group_size=16), lambda n, k: nvfp4(n, k, reciprocal=False)),
    "modelopt, mxfp4": (modelopt("W4A8_MXFP4_FP8"), lambda n, k: mxfp4(n, k, "weight")),
    "modelopt, mxfp8": (modelopt("MXFP8"), mxfp8),
    "nvfp4 of compressed-tensors": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        lambda n, k: nvfp4(n, k, reciprocal=True),
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        mxfp4,
    ),
    "mxfp8 of compressed-tensors": (
        compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32),
        mxfp8,
    ),
    "nf4": (BNB, nf4),
    "nf4, nested scales": (BNB | {"bnb_4bit_use_double_quant": True}, lambda n, k: nf4(n, k, nested=True)),
    "fp4": (BNB | {"bnb_4bit_quant_type": "fp4"}, lambda n, k: nf4(n, k, kind="fp4")),
    "int8 of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
}


def with_powers(n: int, k: int) -> tuple[Parts, Weight]:
    """Blocks of 128 by 128 whose scales are powers of two, in float8's type for them."""
    parts, _ = float8(n, k, (1,), "weight_scale")
    scale, scale_XY = e8m0(9, -(-n // 128), -(-k // 128))
    spread_NK = scale_XY[np.arange(n) // 128][:, np.arange(k) // 128]
    weight = parts["weight"].float().numpy() * spread_NK
    return {"weight": parts["weight"], "weight_scale_inv": scale.view(torch.float8_e8m0fnu)}, weight


def blocks(n: int, k: int) -> tuple[Parts, Weight]:
    """Blocks of 16 outputs and 32 inputs."""
    parts, _ = float8(n, k, (n, 1), "weight_scale")
    scale = scales(9, -(-n // 16), -(-k // BLOCK)).astype(np.float32)
    parts["weight_scale"] = torch.from_numpy(scale)
    spread_NK = scale[np.arange(n) // 16][:, np.arange(k) // 32]
    return parts, parts["weight"].float().numpy() * spread_NK


def module(name: str, parts: Parts) -> Parts:
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def quantise(plain: Path, folder: Path, case: str) -> Path:
    """Write a copy of a checkpoint with random codes, of the same spread, for the weights of its projections."""
    config, write = CASES[case]
    shutil.copytree(plain, folder)
    tensors, replaced = load_file(plain / "model.safetensors"), {}
    for key in [key for key, tensor in tensors.items() if key.endswith("_proj.weight") and tensor.ndim == 2]:
        n, k = tensors[key].shape
        if n % 8 or k % BLOCK:
            continue
        parts, weight = write(n, k)
        shrink = float(tensors[key].std() / weight.std())
        scaled = parts.keys() & {"weight_scale_2", "weight.absmax"} or {
            part for part in parts if "scale" in part or part == "biases"
        }
        parts = {part: t * shrink if part in scaled else t for part, t in parts.items()}
        replaced |= module(key.removesuffix(".weight"), parts)
        del tensors[key]
    assert replaced
    save_file(tensors | replaced, folder / "model.safetensors")
    edited = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(edited))
    return folder

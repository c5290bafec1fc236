"""Readers of quantised weights in Hugging Face checkpoints, one for each tool that writes them.

N outputs, K inputs, X groups of inputs in a row, R rows, W words of 32 bits. Scales of activations and of KV are not
read: neither is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.config_keys import ConfigKeys
from headwater.mixers.quantised import Quantised
from headwater.models.bitsandbytes import BitsAndBytes
from headwater.models.families.quantised import (
    GPTQ_FORMATS,
    MLX_BITS,
    block_of,
    check_quantisation,
    groups_of,
    quantisation,
)
from headwater.models.packing import (
    Method,
    bits_of,
    check_shape,
    float4,
    float8,
    scale_by_row,
    signed,
    unpacked,
    with_groups_of,
    zeros,
)

AWQ_BITS = 4
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word, from the lowest bits
PACKED, SCALE, ZERO, G_IDX = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
GLOBAL_SCALE = "weight_global_scale"
INPUTS = "input_scale", "input_zero_point", "input_global_scale"


class Awq:
    """AWQ (Lin et al., 2023): integers of 4 bits in words along the outputs, interleaved; scales, zeros of groups.

    Tensors of a module, as AutoAWQ writes them (version "gemm"): `qweight` [K, N / 8], `qzeros` [X, N / 8], `scales`
    [X, N]. Groups follow from the tensors' shapes.
    """

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        scale_XN = check_shape("scales", parts["scales"], len(parts["scales"]), n_out)
        word_KV = check_shape("qweight", parts["qweight"], n_in, n_out // 8)
        word_XV = check_shape("qzeros", parts["qzeros"], len(scale_XN), n_out // 8)
        code_NK, zero_NX = (_awq_ordered(word).T.contiguous() for word in (word_KV, word_XV))
        return Quantised(code_NK, AWQ_BITS, scale_XN.T.contiguous(), zero_NX)


def _awq_ordered(word_RV: Tensor) -> Tensor:
    code_RV8 = unpacked(word_RV, AWQ_BITS).unflatten(1, (-1, len(AWQ_ORDER)))
    code_RN: Tensor = code_RV8[:, :, AWQ_ORDER].flatten(1)
    return code_RN


class Gptq:
    """GPTQ (Frantar et al., 2022): integers of 2, 3, 4 or 8 bits in words along the inputs; scales, zeros of groups.

    Tensors of a module, as AutoGPTQ and GPTQModel write them: `qweight` [K · bits / 32, N], `qzeros`
    [X, N · bits / 32], `scales` [X, N], `g_idx` [K], the group of each input. The first format stores zeros less 1.
    Bits and groups follow from the tensors' shapes.
    """

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, keys: ConfigKeys) -> None:
        first = (keys.optional("checkpoint_format") or GPTQ_FORMATS[0]) == GPTQ_FORMATS[0]
        self.less = 1 if first else 0  # how much smaller zeros are stored

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        bits = bits_of(len(parts["qweight"]), n_in, "qweight")
        word_WN = check_shape("qweight", parts["qweight"], n_in * bits // 32, n_out)
        scale_XN = check_shape("scales", parts["scales"], len(parts["scales"]), n_out)
        groups = len(scale_XN)
        word_XV = check_shape("qzeros", parts["qzeros"], groups, n_out * bits // 32)
        zero_XN = (unpacked(word_XV, bits) + self.less) & (2**bits - 1)
        weight = Quantised(unpacked(word_WN.T, bits), bits, scale_XN.T.contiguous(), zero_XN.T.contiguous())
        return with_groups_of(weight, parts.get("g_idx"), "g_idx")


class Fp8:
    """FP8 (DeepSeek-V3, 2024, section 3.3.2): float8 numbers (e4m3) with scales of blocks, of outputs, or one for all.

    Tensors of a module: `weight` [N, K], and `weight_scale_inv`, which multiplies it in spite of its name,
    [N / 128, K / 128]; other tools write `weight_scale`.
    """

    marks = ("weight_scale_inv", "weight_scale")
    parts = ("weight", *marks, "input_scale", "activation_scale", "input_scale_ub")

    def __init__(self, keys: ConfigKeys) -> None:
        self.block = block_of(keys, "weight_block_size")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        code_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if code_NK.dtype != torch.float8_e4m3fn:
            raise ValueError(f"weight is of {code_NK.dtype}, must be of {torch.float8_e4m3fn}")
        name = next(mark for mark in self.marks if mark in parts)
        return float8(code_NK, scale_by_row(parts[name], n_out, n_in, self.block, name))


class ModelOpt:
    """ModelOpt of NVIDIA: float8 (e4m3), NVFP4, MXFP4 and MXFP8, each module as the types of its tensors say.

    Tensors of a module: `weight` [N, K] of float8, or [N, K / 2] of bytes with two floats of 4 bits; `weight_scale` of
    the whole weight, of outputs, of blocks of 128 by 128, or of groups of 16 (e4m3) or 32 inputs (a byte, e8m0);
    `weight_scale_2`, by which scales in e4m3 are multiplied.
    """

    marks = ("weight_scale",)
    parts = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        weight, scale = parts["weight"], parts["weight_scale"]
        if "pre_quant_scale" in parts:
            raise ValueError("pre_quant_scale, a factor for each input, is not read: take one of NVFP4 or FP8 without")
        if weight.dtype == torch.uint8:
            return float4(weight, scale, parts.get("weight_scale_2"), n_out, n_in, "weight")
        scale_NX = scale_by_row(scale, n_out, n_in, (128, 128), "weight_scale")
        return float8(check_shape("weight", weight, n_out, n_in), scale_NX)


class Mxfp4:
    """MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores its experts: floats of 4 bits, a power of two for 32.

    Tensors of all experts: `gate_up_proj_blocks` [E, N, K / 32, 16], two floats a byte; `gate_up_proj_scales`
    [E, N, K / 32].
    """

    marks = ("blocks",)
    parts = ("blocks", "scales")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        return float4(parts["blocks"].flatten(1), parts["scales"], None, n_out, n_in, "blocks")


class Compressed:
    """compressed-tensors of llm-compressor: integers of 4 or 8 bits, packed or not, float8, NVFP4, MXFP4 or MXFP8.

    Scales are of groups, outputs or blocks. Tensors of a module: `weight_packed` [N, K · bits / 32] of unsigned
    integers, signed ones plus 2^(bits − 1), or `weight` [N, K] of int8 or float8; `weight_scale` [N, X]; for asymmetric
    groups `weight_zero_point`, packed along the outputs, [N · bits / 32, X], or plain. Floats of 4 bits are two a byte
    in `weight_packed`; those of NVFP4 have `weight_global_scale`, by which scales are divided.
    """

    marks = (PACKED, SCALE)
    parts = ("weight", PACKED, SCALE, ZERO, G_IDX, GLOBAL_SCALE, "weight_shape", *INPUTS)

    def __init__(self, keys: ConfigKeys) -> None:
        weights = (ConfigKeys(group.optional("weights") or {}) for group in groups_of(keys))
        self.block = next((block for block in (block_of(w, "block_structure") for w in weights) if block), None)

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        if PACKED in parts and parts[PACKED].dtype == torch.uint8:
            outer = parts.get(GLOBAL_SCALE)
            outer = None if outer is None else 1 / outer.float()
            return float4(parts[PACKED], parts[SCALE], outer, n_out, n_in, PACKED)
        scale_NX = scale_by_row(parts[SCALE], n_out, n_in, self.block, SCALE)
        if PACKED in parts:
            bits = bits_of(parts[PACKED].shape[1], n_in, PACKED)
            code_NK = unpacked(check_shape(PACKED, parts[PACKED], n_out, n_in * bits // 32), bits)
            weight = Quantised(code_NK, bits, scale_NX, _unsigned_zeros(parts.get(ZERO), bits, n_out))
            group_K = parts.get(G_IDX)
            unused = group_K is not None and bool((group_K < 0).any())  # as a tool leaves it without act order
            return weight if unused else with_groups_of(weight, group_K, G_IDX)
        weight_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if weight_NK.dtype == torch.float8_e4m3fn:
            return float8(weight_NK, scale_NX)
        if weight_NK.dtype != torch.int8:
            raise ValueError(f"weight is of {weight_NK.dtype}, must be of torch.int8 or {torch.float8_e4m3fn}")
        return Quantised(signed(weight_NK, 8), 8, scale_NX, _unsigned_zeros(parts.get(ZERO), 8, n_out))


def _unsigned_zeros(zero: Tensor | None, bits: int, n_out: int) -> Tensor:
    """Return zeros [N, X] of unsigned codes."""
    if zero is None:
        return zeros(n_out, 2 ** (bits - 1))
    if zero.dtype == torch.int32:
        return unpacked(zero.T, bits).T[:n_out].contiguous()
    plain = signed(zero, bits)
    return plain.expand(n_out, 1).contiguous() if zero.numel() == 1 else plain.reshape(n_out, -1)


class Mlx:
    """Affine integers of MLX: scale · code + bias, codes of 2 to 8 bits one after the other in words along the inputs.

    Tensors of a module: `weight` [N, K · bits / 32], `scales` and `biases` [N, X]. Bits and groups follow from the
    tensors' shapes, so that modules may differ. A module whose `scales` are bytes is in MXFP4, without `biases`.
    """

    marks = ("scales",)
    parts = ("weight", "scales", "biases")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        if parts["scales"].dtype == torch.uint8:
            scale_NX = check_shape("scales", parts["scales"], n_out, n_in // 32)
            return float4(parts["weight"].contiguous().view(torch.uint8), scale_NX, None, n_out, n_in, "weight")
        bits, words = 32 * parts["weight"].shape[-1] // n_in, parts["weight"]
        if bits not in MLX_BITS:
            raise ValueError(f"weight has {words.shape[-1]} words for {n_in} integers, not of {MLX_BITS} bits")
        check_shape("weight", words, n_out, n_in * bits // 32)
        scale_NX, bias_NX = (parts[name].float() for name in ("scales", "biases"))
        check_shape("biases", bias_NX, *check_shape("scales", scale_NX, n_out, scale_NX.shape[-1]).shape)
        return Quantised(unpacked(words, bits), bits, scale_NX, zeros(n_out, 0), -bias_NX)


METHODS: dict[str, Callable[[ConfigKeys], Method]] = {
    "awq": lambda keys: Awq(),
    "bitsandbytes": lambda keys: BitsAndBytes(),
    "compressed-tensors": Compressed,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mlx": lambda keys: Mlx(),
    "modelopt": lambda keys: ModelOpt(),
    "mxfp4": lambda keys: Mxfp4(),
}


def method_of(config: dict[str, Any]) -> Method | None:
    """Return the reader of a checkpoint's quantised weights, or None if it has none. Raises CheckpointError."""
    check_quantisation(config)
    described = quantisation(config)
    return None if described is None else METHODS[described["quant_method"]](ConfigKeys(described))

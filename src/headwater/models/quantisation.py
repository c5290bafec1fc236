"""Readers of quantised weights in Hugging Face checkpoints: AWQ, GPTQ, FP8 and compressed-tensors.

N outputs, K inputs, X groups of inputs in a row, R rows, W words of 32 bits. Scales of activations and of KV are not
read: neither is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.config_keys import ConfigKeys
from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import (
    GPTQ_BITS,
    GPTQ_FORMATS,
    block_of,
    check_quantisation,
    groups_of,
    quantisation,
)

WORD = 32  # bits
BYTE = 8
NAN = 0x7F  # bits of a float8 NaN, without its sign
AWQ_BITS = 4
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word, from the lowest bits
PACKED, SCALE, ZERO, G_IDX = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"


class Method(Protocol):
    """Reader of the weights of a checkpoint that one tool has quantised."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Names, after a module's, of which one is there if its weight is quantised."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names, after a module's, of all tensors that may belong to a quantised weight."""

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        """Return the weight [N, K]. Raises ValueError that names the part that is wrong, with both shapes."""


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
    parts = ("weight", *marks, "input_scale", "activation_scale")

    def __init__(self, keys: ConfigKeys) -> None:
        self.block = block_of(keys, "weight_block_size")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        code_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if code_NK.dtype != torch.float8_e4m3fn:
            raise ValueError(f"weight is of {code_NK.dtype}, must be of {torch.float8_e4m3fn}")
        name = next(mark for mark in self.marks if mark in parts)
        scale_NX = scale_by_row(parts[name], n_out, n_in, self.block, name)
        return float8(code_NK, scale_NX.float())


class Compressed:
    """compressed-tensors of llm-compressor: integers of 4 or 8 bits, packed or not, or float8 numbers.

    Scales are of groups, outputs or blocks. Tensors of a module: `weight_packed` [N, K · bits / 32] of unsigned
    integers, signed ones plus 2^(bits − 1), or `weight` [N, K] of int8 or float8; `weight_scale` [N, X]; for asymmetric
    groups `weight_zero_point`, packed along the outputs, [N · bits / 32, X], or plain.
    """

    marks = (PACKED, SCALE)
    parts = ("weight", PACKED, SCALE, ZERO, G_IDX, "weight_shape", "input_scale", "input_zero_point")

    def __init__(self, keys: ConfigKeys) -> None:
        weights = (ConfigKeys(group.optional("weights") or {}) for group in groups_of(keys))
        self.block = next((block for block in (block_of(w, "block_structure") for w in weights) if block), None)

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        blocked = self.block if len(parts[SCALE]) not in (1, n_out) else None
        scale_NX = scale_by_row(parts[SCALE], n_out, n_in, blocked, SCALE)
        if PACKED in parts:
            bits = bits_of(parts[PACKED].shape[1], n_in, PACKED)
            code_NK = unpacked(check_shape(PACKED, parts[PACKED], n_out, n_in * bits // 32), bits)
            weight = Quantised(code_NK, bits, scale_NX, _unsigned_zeros(parts.get(ZERO), bits, n_out))
            return with_groups_of(weight, parts.get(G_IDX), G_IDX)
        weight_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if weight_NK.dtype == torch.float8_e4m3fn:
            return float8(weight_NK, scale_NX)
        if weight_NK.dtype != torch.int8:
            raise ValueError(f"weight is of {weight_NK.dtype}, must be of torch.int8 or {torch.float8_e4m3fn}")
        return Quantised(_unsigned(weight_NK, 8), 8, scale_NX, _unsigned_zeros(parts.get(ZERO), 8, n_out))


def _unsigned_zeros(zero: Tensor | None, bits: int, n_out: int) -> Tensor:
    """Return zeros [N, X] of unsigned codes."""
    if zero is None:
        return zeros(n_out, 2 ** (bits - 1))
    if zero.dtype == torch.int32:
        return unpacked(zero.T, bits).T[:n_out].contiguous()
    plain = _unsigned(zero, bits)
    return plain.expand(n_out, 1).contiguous() if zero.numel() == 1 else plain.reshape(n_out, -1)


def _unsigned(signed: Tensor, bits: int) -> Tensor:
    code: Tensor = signed.to(torch.int16) + 2 ** (bits - 1)
    return code.to(torch.uint8)


METHODS: dict[str, Callable[[ConfigKeys], Method]] = {
    "awq": lambda keys: Awq(),
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "gptq": Gptq,
}


def method_of(config: dict[str, Any]) -> Method | None:
    """Return the reader of a checkpoint's quantised weights, or None if it has none. Raises CheckpointError."""
    check_quantisation(config)
    described = quantisation(config)
    return None if described is None else METHODS[described["quant_method"]](ConfigKeys(described))


def unpacked(word_RW: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in words of int32, uint8 [R, W · 32 / bits], those of the lowest bits first.

    An integer whose bits do not divide 32 may lie in two words.
    """
    byte_RB, mask = word_RW.contiguous().view(torch.uint8), 2**bits - 1
    if bits == BYTE:
        return byte_RB
    if BYTE % bits == 0:
        return torch.stack([(byte_RB >> shift) & mask for shift in range(0, BYTE, bits)], -1).flatten(-2)
    byte_RGb = byte_RB.unflatten(1, (-1, bits)).to(torch.int64)  # of eight integers
    eight_RG1 = (byte_RGb << torch.arange(0, BYTE * bits, BYTE)).sum(-1, keepdim=True)
    code_RN: Tensor = (eight_RG1 >> torch.arange(0, BYTE * bits, bits) & mask).flatten(1)
    return code_RN.to(torch.uint8)


def bits_of(words: int, integers: int, name: str) -> int:
    """Return the bits of an integer, of which `words` words hold `integers`. Raises ValueError unless 2, 3, 4 or 8."""
    bits = WORD * words / integers
    if bits not in GPTQ_BITS:
        raise ValueError(f"{name} has {words} words for {integers} integers, which is {bits:g} bits, not 2, 3, 4 or 8")
    return int(bits)


def check_shape(name: str, tensor: Tensor, *wanted: int) -> Tensor:
    """Return the tensor. Raises ValueError, with both shapes, for another shape than the one wanted."""
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(wanted)}")
    return tensor


def with_groups_of(weight: Quantised, group_K: Tensor | None, name: str) -> Quantised:
    """Return a weight whose inputs are in the groups `group_K`: those of a group follow each other in its codes.

    Groups that do not follow each other come from a quantiser that began with the inputs of the largest activations
    (act order). Raises ValueError for groups of different sizes.
    """
    n_groups = weight.scale_NX.shape[1]
    if group_K is None or n_groups == 1:
        return weight
    group_K = check_shape(name, group_K.to(torch.int64), weight.shape[1])
    order_K = torch.argsort(group_K, stable=True)
    wanted_K = torch.arange(len(group_K)) // weight.group
    if not torch.equal(group_K[order_K], wanted_K):
        raise ValueError(f"{name} does not have {weight.group} inputs for each of {n_groups} groups")
    if torch.equal(group_K, wanted_K):
        return weight
    return replace(weight, code_NK=weight.code_NK[:, order_K], order_K=order_K)


def scale_by_row(scale: Tensor, n_out: int, n_in: int, block: tuple[int, int] | None, name: str) -> Tensor:
    """Return scales [N, X] from one for all, one an output, one a group of inputs, or one a block of both.

    A last block that is smaller makes groups smaller: 576 inputs in blocks of 128 are groups of 64.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(n_out, 1).contiguous()
    scale = scale.reshape(len(scale), -1)
    if block is None:
        return check_shape(name, scale, n_out, scale.shape[1])
    rows, columns = block
    check_shape(name, scale, -(-n_out // rows), -(-n_in // columns))
    group = gcd(columns, n_in)
    of_row_N = torch.arange(n_out) // rows
    of_group_X = torch.arange(n_in // group) * group // columns
    return scale[of_row_N][:, of_group_X]


def float8(code_NK: Tensor, scale_NX: Tensor) -> Quantised:
    """Return a weight whose codes are float8 numbers (e4m3) as they are. Raises ValueError if one is NaN."""
    n_nan = int((code_NK.view(torch.uint8) & NAN == NAN).sum())
    if n_nan:
        raise ValueError(f"weight has {n_nan:,} numbers that are NaN, of {code_NK.numel():,}")
    return Quantised(code_NK, BYTE, scale_NX, zeros(len(code_NK), 0))


def zeros(n_out: int, zero: int) -> Tensor:
    """Return one zero for all groups of an output, [N, 1]."""
    return torch.full((n_out, 1), zero, dtype=torch.uint8)

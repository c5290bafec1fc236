"""Packed integers, small floats and scales as files of quantised weights hold them, and the groups of their inputs.

N outputs, K inputs, X groups of inputs in a row, B bytes of a row, R rows, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import GPTQ_BITS

WORD = 32  # bits
BYTE = 8
NAN = 0x7F  # bits of a float8 NaN, without its sign
E8M0_NAN = 255
FLOAT32_MANTISSA = 23  # bits
# floats of 4 bits with 2 bits of exponent and 1 of mantissa (e2m1), from 0 to 6, and from 0 to -6: twice each, plus 12
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


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
    """Return scales [N, X] from one for all, one an output, one a group of inputs, one a block of both, or one a half.

    A last block that is smaller makes groups smaller: 576 inputs in blocks of 128 are groups of 64. Halves, or more
    equal parts of the outputs, are projections that a tool has joined.
    """
    scale = numbers(scale)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(n_out, 1).contiguous()
    scale = scale.reshape(len(scale), -1)
    if len(scale) == n_out:
        return scale
    if scale.shape[1] == 1 and n_out % len(scale) == 0:
        return scale.repeat_interleave(n_out // len(scale), 0)
    if block is None:
        return check_shape(name, scale, n_out, scale.shape[1])
    rows, columns = block
    check_shape(name, scale, -(-n_out // rows), -(-n_in // columns))
    group = gcd(columns, n_in)
    of_row_N = torch.arange(n_out) // rows
    of_group_X = torch.arange(n_in // group) * group // columns
    return scale[of_row_N][:, of_group_X]


def numbers(scale: Tensor) -> Tensor:
    """Return scales as numbers: those of a byte are powers of two (e8m0), stored as their exponents plus 127.

    2^-127 becomes 0, as denormals do in products. Raises ValueError for NaN, which is 255.
    """
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scale
    exponent = scale.view(torch.uint8).to(torch.int32)
    if bool((exponent == E8M0_NAN).any()):
        raise ValueError("a scale is NaN")
    return (exponent << FLOAT32_MANTISSA).view(torch.float32)


def float8(code_NK: Tensor, scale_NX: Tensor) -> Quantised:
    """Return a weight whose codes are float8 numbers (e4m3) as they are. Raises ValueError if one is NaN."""
    return Quantised(check_numbers("weight", code_NK), BYTE, scale_NX.float(), zeros(len(code_NK), 0))


def check_numbers(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of float8 (e4m3). Raises ValueError if a number is NaN."""
    n_nan = int((tensor.view(torch.uint8) & NAN == NAN).sum())
    if n_nan:
        raise ValueError(f"{name} has {n_nan:,} numbers that are NaN, of {tensor.numel():,}")
    return tensor


def float4(byte_NB: Tensor, scale_NX: Tensor, outer: Tensor | None, n_out: int, n_in: int, name: str) -> Quantised:
    """Return a weight of floats of 4 bits (e2m1), two a byte, the first in the lower bits.

    Scales are powers of two (MXFP4), or e4m3 times `outer`, which is float32 (NVFP4). The table has twice each number.
    """
    code_NK = unpacked(check_shape(name, byte_NB, n_out, n_in // 2), 4)
    check_shape("scale", scale_NX, n_out, scale_NX.shape[-1])
    zero_N1 = zeros(n_out, E2M1[0])
    if outer is None:
        half_NX = (numbers(scale_NX).float() / 2).bfloat16()  # exact for powers of two
        return Quantised(code_NK, 4, half_NX, zero_N1, table=E2M1)
    if scale_NX.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scale is of {scale_NX.dtype}, must be of {torch.float8_e4m3fn}")
    outer_N1 = (outer.float() / 2).reshape(1, 1).expand(n_out, 1).contiguous()
    return Quantised(code_NK, 4, check_numbers("scale", scale_NX), zero_N1, outer_scale_NS=outer_N1, table=E2M1)


def signed(integer: Tensor, bits: int) -> Tensor:
    """Return integers from −2^(bits − 1) on as codes: unsigned ones."""
    code: Tensor = integer.to(torch.int16) + 2 ** (bits - 1)
    return code.to(torch.uint8)


def zeros(n_out: int, zero: int) -> Tensor:
    """Return one zero for all groups of an output, [N, 1]."""
    return torch.full((n_out, 1), zero, dtype=torch.uint8)

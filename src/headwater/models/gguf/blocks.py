"""Types of tensors in GGUF files: plain numbers, and blocks of integers with scales (ggml's quants).

Formulas: ggml-quants.c of github.com/ggml-org/ggml, in float32 as there. A block's fields stand one after the other.

N outputs, B blocks in a row, Y bytes of a block, G groups of a block; d scale and m minimum of a block, float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised

SUPER = 256  # inputs of a block with groups: of the K formats
GROUPS = 8  # of 32 inputs, in Q4_K and Q5_K


@dataclass(frozen=True)
class Blocks:
    """Type of a tensor: bytes of a block, and its reader."""

    name: str
    inputs: int  # of a block
    bytes: int  # of a block
    read: Callable[[Tensor], Quantised]  # of uint8 [N, B, Y]


@dataclass(frozen=True)
class Plain:
    """Type of a tensor whose numbers stand as they are."""

    name: str
    dtype: torch.dtype


def _half(block_NBY: Tensor, at: int) -> Tensor:
    """Return the float16 number at a byte of each block, [N, B]."""
    return block_NBY[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _zero(block_NBY: Tensor, zero: int) -> Tensor:
    return torch.full((len(block_NBY), 1), zero, dtype=torch.uint8)


def _nibbles(byte: Tensor) -> Tensor:
    """Return the lower four bits of some bytes, then the higher ones of the same bytes."""
    return torch.cat([byte & 15, byte >> 4], -1)


def _fifth_bits(block_NBY: Tensor, at: int) -> Tensor:
    """Return 32 bits, the lowest of the first byte first, each as 0 or 16."""
    shift_8 = torch.arange(8, dtype=torch.uint8)
    return ((block_NBY[:, :, at : at + 4, None] >> shift_8) & 1).flatten(2) << 4


def _q4_0(block_NBY: Tensor) -> Quantised:
    return Quantised(_nibbles(block_NBY[:, :, 2:]).flatten(1), 4, _half(block_NBY, 0), _zero(block_NBY, 8))


def _q4_1(block_NBY: Tensor) -> Quantised:
    d_NB, m_NB = _half(block_NBY, 0), _half(block_NBY, 2)
    return Quantised(_nibbles(block_NBY[:, :, 4:]).flatten(1), 4, d_NB, _zero(block_NBY, 0), -m_NB)


def _q5_0(block_NBY: Tensor) -> Quantised:
    code_NK = (_nibbles(block_NBY[:, :, 6:]) | _fifth_bits(block_NBY, 2)).flatten(1)
    return Quantised(code_NK, 5, _half(block_NBY, 0), _zero(block_NBY, 16))


def _q5_1(block_NBY: Tensor) -> Quantised:
    code_NK = (_nibbles(block_NBY[:, :, 8:]) | _fifth_bits(block_NBY, 4)).flatten(1)
    return Quantised(code_NK, 5, _half(block_NBY, 0), _zero(block_NBY, 0), -_half(block_NBY, 2))


def _q8_0(block_NBY: Tensor) -> Quantised:
    """Signed integers; less 128, a byte is the same with its highest bit turned."""
    return Quantised((block_NBY[:, :, 2:] ^ 128).flatten(1), 8, _half(block_NBY, 0), _zero(block_NBY, 128))


def _six_bits(byte_NB12: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of 8 groups, 6 bits each, from 12 bytes: [N, B · 8]."""
    first, second, third = byte_NB12.split(4, -1)
    scale_NBG = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minimum_NBG = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return scale_NBG.flatten(1), minimum_NBG.flatten(1)


def _of_groups(block_NBY: Tensor, code_NK: Tensor, bits: int) -> Quantised:
    """Return a weight whose blocks begin with d, m and 12 bytes of scales and minimums of groups."""
    scale_NX, minimum_NX = _six_bits(block_NBY[:, :, 4:16])
    outer = _half(block_NBY, 0), _half(block_NBY, 2)
    return Quantised(code_NK, bits, scale_NX, _zero(block_NBY, 0), minimum_NX, *outer)


def _q4_k(block_NBY: Tensor) -> Quantised:
    of_pair = _nibbles(block_NBY[:, :, 16:].unflatten(2, (GROUPS // 2, -1)))
    return _of_groups(block_NBY, of_pair.flatten(1), 4)


def _q5_k(block_NBY: Tensor) -> Quantised:
    of_group = _nibbles(block_NBY[:, :, 48:].unflatten(2, (GROUPS // 2, -1))).unflatten(3, (2, -1)).flatten(2, 3)
    shift_G1 = torch.arange(GROUPS, dtype=torch.uint8)[:, None]
    fifth = ((block_NBY[:, :, None, 16:48] >> shift_G1) & 1) << 4
    return _of_groups(block_NBY, (of_group | fifth).flatten(1), 5)


def _q6_k(block_NBY: Tensor) -> Quantised:
    """Lower four bits [2, 64], higher two bits [2, 32], 16 scales of int8, d; halves of 128 inputs."""
    low = _nibbles(block_NBY[:, :, :128].unflatten(2, (2, -1)))
    shift_41 = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((block_NBY[:, :, 128:192].unflatten(2, (2, 1, -1)) >> shift_41) & 3).flatten(3) << 4
    scale_NX = block_NBY[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    code_NK = (low | high).flatten(1)
    return Quantised(code_NK, 6, scale_NX, _zero(block_NBY, 32), outer_scale_NS=_half(block_NBY, 208))


TYPES: dict[int, Blocks | Plain] = {
    0: Plain("F32", torch.float32),
    1: Plain("F16", torch.float16),
    2: Blocks("Q4_0", 32, 18, _q4_0),
    3: Blocks("Q4_1", 32, 20, _q4_1),
    6: Blocks("Q5_0", 32, 22, _q5_0),
    7: Blocks("Q5_1", 32, 24, _q5_1),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    12: Blocks("Q4_K", SUPER, 144, _q4_k),
    13: Blocks("Q5_K", SUPER, 176, _q5_k),
    14: Blocks("Q6_K", SUPER, 210, _q6_k),
    30: Plain("BF16", torch.bfloat16),
}
OTHERS = {  # types that are not read, by name
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

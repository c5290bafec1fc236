"""Types of a GGUF file's tensors: blocks of integers, in the form of products (`mixers/quantised.py`), or numbers.

Formulas: ggml-quants.c of github.com/ggml-org/ggml, in float32 as there. A block's fields stand one after the other.

N outputs, B blocks in a row, Y bytes of a block, G groups of a block; d scale and m minimum of a block, float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised
from headwater.models.gguf import grids
from headwater.models.gguf.fields import bits_of, half_at, nibbles, zero_of
from headwater.models.gguf.file import TensorPlace

SUPER = 256  # inputs of a block with groups: of the K formats
GROUPS = 8  # of 32 inputs, in Q4_K and Q5_K
# numbers that codes stand for, plus a zero that makes them positive: IQ4_NL's, and those of e2m1, doubled
IQ4_NL_ZERO, E2M1_ZERO = 128, 12
IQ4_NL = tuple(
    IQ4_NL_ZERO + x for x in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)  # fmt: skip
E2M1 = tuple(E2M1_ZERO + sign * x for sign in (1, -1) for x in (0, 1, 2, 3, 4, 6, 8, 12))
POWER_BIAS = 128  # of a power of two in MXFP4, e8m0: 127, and 1 for doubled numbers


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


def _fifth_bits(block_NBY: Tensor, at: int) -> Tensor:
    """Return 32 bits, the lowest of the first byte first, each as 0 or 16."""
    shift_8 = torch.arange(8, dtype=torch.uint8)
    return ((block_NBY[:, :, at : at + 4, None] >> shift_8) & 1).flatten(2) << 4


def _q4_0(block_NBY: Tensor) -> Quantised:
    return Quantised(nibbles(block_NBY[:, :, 2:]).flatten(1), 4, half_at(block_NBY, 0), zero_of(block_NBY, 8))


def _q4_1(block_NBY: Tensor) -> Quantised:
    d_NB, m_NB = half_at(block_NBY, 0), half_at(block_NBY, 2)
    return Quantised(nibbles(block_NBY[:, :, 4:]).flatten(1), 4, d_NB, zero_of(block_NBY, 0), -m_NB)


def _q5_0(block_NBY: Tensor) -> Quantised:
    code_NK = (nibbles(block_NBY[:, :, 6:]) | _fifth_bits(block_NBY, 2)).flatten(1)
    return Quantised(code_NK, 5, half_at(block_NBY, 0), zero_of(block_NBY, 16))


def _q5_1(block_NBY: Tensor) -> Quantised:
    code_NK = (nibbles(block_NBY[:, :, 8:]) | _fifth_bits(block_NBY, 4)).flatten(1)
    return Quantised(code_NK, 5, half_at(block_NBY, 0), zero_of(block_NBY, 0), -half_at(block_NBY, 2))


def _q8_0(block_NBY: Tensor) -> Quantised:
    """Signed integers; less 128, a byte is the same with its highest bit turned."""
    return Quantised((block_NBY[:, :, 2:] ^ 128).flatten(1), 8, half_at(block_NBY, 0), zero_of(block_NBY, 128))


def _six_bits(byte_NB12: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of 8 groups, 6 bits each, from 12 bytes: [N, B · 8]."""
    first, second, third = byte_NB12.split(4, -1)
    scale_NBG = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minimum_NBG = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return scale_NBG.flatten(1), minimum_NBG.flatten(1)


def _of_groups(block_NBY: Tensor, code_NK: Tensor, bits: int) -> Quantised:
    """Return a weight whose blocks begin with d, m and 12 bytes of scales and minimums of groups."""
    scale_NX, minimum_NX = _six_bits(block_NBY[:, :, 4:16])
    outer = half_at(block_NBY, 0), half_at(block_NBY, 2)
    return Quantised(code_NK, bits, scale_NX, zero_of(block_NBY, 0), minimum_NX, *outer)


def _q4_k(block_NBY: Tensor) -> Quantised:
    of_pair = nibbles(block_NBY[:, :, 16:].unflatten(2, (GROUPS // 2, -1)))
    return _of_groups(block_NBY, of_pair.flatten(1), 4)


def _q5_k(block_NBY: Tensor) -> Quantised:
    of_group = nibbles(block_NBY[:, :, 48:].unflatten(2, (GROUPS // 2, -1))).unflatten(3, (2, -1)).flatten(2, 3)
    shift_G1 = torch.arange(GROUPS, dtype=torch.uint8)[:, None]
    fifth = ((block_NBY[:, :, None, 16:48] >> shift_G1) & 1) << 4
    return _of_groups(block_NBY, (of_group | fifth).flatten(1), 5)


def _q6_k(block_NBY: Tensor) -> Quantised:
    """Lower four bits [2, 64], higher two bits [2, 32], 16 scales of int8, d; halves of 128 inputs."""
    low = nibbles(block_NBY[:, :, :128].unflatten(2, (2, -1)))
    shift_41 = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((block_NBY[:, :, 128:192].unflatten(2, (2, 1, -1)) >> shift_41) & 3).flatten(3) << 4
    scale_NX = block_NBY[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    code_NK = (low | high).flatten(1)
    return Quantised(code_NK, 6, scale_NX, zero_of(block_NBY, 32), outer_scale_NS=half_at(block_NBY, 208))


def _q2_k(block_NBY: Tensor) -> Quantised:
    """16 bytes with a scale and a minimum of a group, codes of 2 bits [2, 32], d, m; halves of 128 inputs."""
    group_NX = block_NBY[:, :, :16].flatten(1)
    code_NK = bits_of(block_NBY[:, :, 16:80].unflatten(2, (2, 32)), 2, -2).flatten(1)
    outer = half_at(block_NBY, 80), half_at(block_NBY, 82)
    return Quantised(code_NK, 2, group_NX & 15, zero_of(block_NBY, 0), group_NX >> 4, *outer)


def _q3_k(block_NBY: Tensor) -> Quantised:
    """Third bits [32], lower two bits [2, 32], 12 bytes of scales of 6 bits, plus 32, d; halves of 128 inputs."""
    low = bits_of(block_NBY[:, :, 32:96].unflatten(2, (2, 32)), 2, -2).flatten(2)
    code_NBK = low | bits_of(block_NBY[:, :, :32], 1, -2).flatten(2) << 2
    scale_NBG = nibbles(block_NBY[:, :, 96:104]) | bits_of(block_NBY[:, :, 104:108], 2, -2).flatten(2) << 4
    scale_NX = scale_NBG.flatten(1).view(torch.int8) - 32
    return Quantised(code_NBK.flatten(1), 3, scale_NX, zero_of(block_NBY, 4), outer_scale_NS=half_at(block_NBY, 108))


def _iq4_nl(block_NBY: Tensor) -> Quantised:
    code_NK = nibbles(block_NBY[:, :, 2:]).flatten(1)
    return Quantised(code_NK, 4, half_at(block_NBY, 0), zero_of(block_NBY, IQ4_NL_ZERO), table=IQ4_NL)


def _iq4_xs(block_NBY: Tensor) -> Quantised:
    """d, higher two bits and lower four bits of 8 scales, plus 32, codes of groups of 32 inputs."""
    scale_NBG = bits_of(block_NBY[:, :, 4:8], 4).flatten(2) | bits_of(block_NBY[:, :, 2:4], 2).flatten(2) << 4
    code_NK = nibbles(block_NBY[:, :, 8:].unflatten(2, (GROUPS, -1))).flatten(1)
    scale_NX, zero = scale_NBG.flatten(1).view(torch.int8) - 32, zero_of(block_NBY, IQ4_NL_ZERO)
    return Quantised(code_NK, 4, scale_NX, zero, outer_scale_NS=half_at(block_NBY, 0), table=IQ4_NL)


def _mxfp4(block_NBY: Tensor) -> Quantised:
    """A power of two, and 32 codes of e2m1."""
    scale_NX = torch.exp2(block_NBY[:, :, 0].double() - POWER_BIAS).bfloat16()
    code_NK = nibbles(block_NBY[:, :, 1:]).flatten(1)
    return Quantised(code_NK, 4, scale_NX, zero_of(block_NBY, E2M1_ZERO), table=E2M1)


TYPES: dict[int, Blocks | Plain] = {
    0: Plain("F32", torch.float32),
    1: Plain("F16", torch.float16),
    2: Blocks("Q4_0", 32, 18, _q4_0),
    3: Blocks("Q4_1", 32, 20, _q4_1),
    6: Blocks("Q5_0", 32, 22, _q5_0),
    7: Blocks("Q5_1", 32, 24, _q5_1),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    10: Blocks("Q2_K", SUPER, 84, _q2_k),
    11: Blocks("Q3_K", SUPER, 110, _q3_k),
    12: Blocks("Q4_K", SUPER, 144, _q4_k),
    13: Blocks("Q5_K", SUPER, 176, _q5_k),
    14: Blocks("Q6_K", SUPER, 210, _q6_k),
    16: Blocks("IQ2_XXS", SUPER, 66, grids.iq2_xxs),
    17: Blocks("IQ2_XS", SUPER, 74, grids.iq2_xs),
    18: Blocks("IQ3_XXS", SUPER, 98, grids.iq3_xxs),
    20: Blocks("IQ4_NL", 32, 18, _iq4_nl),
    21: Blocks("IQ3_S", SUPER, 110, grids.iq3_s),
    22: Blocks("IQ2_S", SUPER, 82, grids.iq2_s),
    23: Blocks("IQ4_XS", SUPER, 136, _iq4_xs),
    30: Plain("BF16", torch.bfloat16),
    39: Blocks("MXFP4", 32, 17, _mxfp4),
}


def bytes_of(place: TensorPlace) -> int:
    """Return the bytes of a tensor in its file."""
    kind, n = TYPES[place.type], prod(place.shape)
    return n * kind.dtype.itemsize if isinstance(kind, Plain) else n // kind.inputs * kind.bytes

"""Types of tensors whose codes are points of a grid: IQ2 and IQ3. A point is the magnitudes of 8 inputs, or of 4.

There are at most 8 magnitudes, so a signed number has a code of 4 bits: its magnitude's, and 8 if it is negative.
Points are looked up once, when a tensor is read. The grids are tables of ggml, under its licence: `assets/ggml-grids`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised
from headwater.models.gguf.fields import bits_of, half_at, zero_of

GRIDS = Path(__file__).parents[2] / "assets" / "ggml-grids" / "grids.json"
MAGNITUDES = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
NEGATIVE = 3  # bit of a code
MAX_MAGNITUDES = 1 << NEGATIVE


@cache
def _grid(name: str) -> Tensor:
    """Return the points of a grid, each as the codes of its magnitudes, uint8."""
    digits = json.loads(GRIDS.read_text())[name]
    width = 8 if name.startswith("IQ2") else 4
    return torch.tensor([int(digit) for digit in digits], dtype=torch.uint8).view(-1, width)


@cache
def _seven_signs() -> Tensor:
    """Return the signs of 8 inputs for 7 bits, uint8 [128, 8]: an even number of them is negative."""
    sign = bits_of(torch.arange(128, dtype=torch.uint8), 1)
    sign[:, 7] = sign.sum(1) & 1
    return sign


def _weight(name: str, point: Tensor, sign: Tensor, scale: Tensor, d_NB: Tensor) -> Quantised:
    """Return a weight from numbers of points, signs of inputs, scales of groups, and outer scales of blocks."""
    code_NK = _grid(name)[point.int()].flatten(1) | sign.flatten(1) << NEGATIVE
    zero, magnitudes = max(MAGNITUDES[name]), MAGNITUDES[name]
    padded = *magnitudes, *[0] * (MAX_MAGNITUDES - len(magnitudes))
    table = tuple(zero + x for x in padded) + tuple(zero - x for x in padded)
    return Quantised(code_NK, 4, scale.flatten(1), zero_of(d_NB, zero), outer_scale_NS=d_NB, table=table)


def _words(byte: Tensor) -> Tensor:
    """Return numbers of 32 bits, int64."""
    return byte.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _shorts(byte: Tensor) -> Tensor:
    """Return numbers of 16 bits, int32."""
    return byte.contiguous().view(torch.int16).int() & 0xFFFF


def _signs_and_scales(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs of 32 inputs, and twice their scale, from 4 times 7 bits and 4 bits."""
    sevens = word[..., None] >> torch.arange(0, 28, 7) & 127
    return _seven_signs()[sevens], _odd(word >> 28)


def _odd(four_bits: Tensor) -> Tensor:
    """Return twice a scale, which is a half more than its 4 bits."""
    return (2 * four_bits + 1).to(torch.uint8)


def iq2_xxs(block_NBY: Tensor) -> Quantised:
    """d; for 32 inputs 4 points of 8 bits, and a word of signs and a scale."""
    group_NBGY = block_NBY[:, :, 2:].unflatten(2, (8, 8))
    sign, scale = _signs_and_scales(_words(group_NBGY[..., 4:])[..., 0])
    return _weight("IQ2_XXS", group_NBGY[..., :4], sign, scale, half_at(block_NBY, 0).float() / 8)


def iq2_xs(block_NBY: Tensor) -> Quantised:
    """d; 32 numbers, each a point of 9 bits and its signs of 7; scales of 16 inputs, 4 bits."""
    number = _shorts(block_NBY[:, :, 2:66])
    sign, scale = _seven_signs()[number >> 9], _odd(bits_of(block_NBY[:, :, 66:], 4))
    return _weight("IQ2_XS", number & 511, sign, scale.flatten(2), half_at(block_NBY, 0).float() / 8)


def iq2_s(block_NBY: Tensor) -> Quantised:
    """d; 32 points' lower 8 bits, their signs, their higher 2 bits; scales of 16 inputs, 4 bits."""
    point = block_NBY[:, :, 2:34].int() | bits_of(block_NBY[:, :, 66:74], 2).flatten(2).int() << 8
    sign, scale = bits_of(block_NBY[:, :, 34:66], 1), _odd(bits_of(block_NBY[:, :, 74:], 4))
    return _weight("IQ2_S", point, sign, scale.flatten(2), half_at(block_NBY, 0).float() / 8)


def iq3_xxs(block_NBY: Tensor) -> Quantised:
    """d; 64 points of 8 bits; for 32 inputs a word of signs and a scale."""
    sign, scale = _signs_and_scales(_words(block_NBY[:, :, 66:]))
    return _weight("IQ3_XXS", block_NBY[:, :, 2:66], sign, scale, half_at(block_NBY, 0).float() / 4)


def iq3_s(block_NBY: Tensor) -> Quantised:
    """d; 64 points' lower 8 bits, their higher bit, signs of inputs; scales of 32 inputs, 4 bits."""
    point = block_NBY[:, :, 2:66].int() | bits_of(block_NBY[:, :, 66:74], 1).flatten(2).int() << 8
    sign, scale = bits_of(block_NBY[:, :, 74:106], 1), _odd(bits_of(block_NBY[:, :, 106:], 4))
    return _weight("IQ3_S", point, sign, scale.flatten(2), half_at(block_NBY, 0).float())

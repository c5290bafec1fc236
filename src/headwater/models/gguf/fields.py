"""Fields of the blocks in a GGUF file's tensors: N outputs, B blocks in a row, Y bytes of a block."""

from __future__ import annotations

import torch
from torch import Tensor


def half_at(block_NBY: Tensor, at: int) -> Tensor:
    """Return the float16 number at a byte of each block, [N, B]."""
    return block_NBY[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def zero_of(block_NBY: Tensor, zero: int) -> Tensor:
    return torch.full((len(block_NBY), 1), zero, dtype=torch.uint8)


def nibbles(byte: Tensor) -> Tensor:
    """Return the lower four bits of some bytes, then the higher ones of the same bytes."""
    return torch.cat([byte & 15, byte >> 4], -1)


def bits_of(byte: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Return numbers of 1, 2 or 4 bits in a new dimension, those of the lowest bits first."""
    shift = torch.arange(0, 8, bits, dtype=torch.uint8)
    shift = shift.view(-1, *[1] * (-1 - dim))
    return byte.unsqueeze(dim) >> shift & (1 << bits) - 1

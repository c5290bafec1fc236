"""Powers of two in whole vectors: the fastest exponential there is on CPU, with bits that depend on an element alone.

Torch's fp32 `exp2` takes a third of the time of `exp` (0.29 against 0.82 ns an element on AVX-512), and does not slow
down where the result is below all floats (`exp`: 10 ns). But what is left over of a stretch after its last whole vector
goes through a scalar routine, whose last bit may differ. So here it only ever sees whole vectors: memory is allocated
in multiples of them, and no call is cut by threads anywhere else.
"""

from __future__ import annotations

import math

import torch

VECTORS = 128  # elements: a stretch of this many is whole vectors, and so is its half
PIECE = 1 << 16  # elements of a call: torch cuts it in two at most, since it gives a thread at least half of that
LOG2_E = math.log2(math.e)


def empty_vectors(*shape: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 memory that was not written: of that shape, and the whole vectors it is the beginning of."""
    size = math.prod(shape)
    vectors = torch.empty(-(-size // VECTORS) * VECTORS, device=device)
    return vectors[:size].view(shape), vectors


def exp2_(vectors: torch.Tensor) -> torch.Tensor:
    """2^x in place, of flat memory from `empty_vectors`."""
    if vectors.device.type != "cpu":
        return vectors.exp2_()
    for piece in vectors.split(PIECE):
        piece.exp2_()
    return vectors

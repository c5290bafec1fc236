"""The residual stream: the sum of a stream and a layer's output, and the norm of that sum, row by row.

A row is computed by one thread, in the order of its channels. Arrays are flat, see `arrays.py`.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part
from headwater.kernels.vectors import LANES, fill, fma, load, square_root, store, sum_lanes

MAX_SINGLE_THREAD_CHANNELS = 4096  # channels · rows that one thread computes faster than several threads do


@part
def _norm_row(x, out, normed, weight, at, width, adds, out_scale, eps):
    """Add one row of `out` to `x`, if it `adds`; write the norm of what `x` then holds."""
    if adds:
        for c in range(at, at + width, LANES):
            store(x, c, fma(fill(np.float32(out_scale)), load(out, c), load(x, c)))
    total = fill(np.float32(0))
    for c in range(at, at + width, LANES):
        total = fma(load(x, c), load(x, c), total)
    mean = sum_lanes(total) / np.float32(width) + np.float32(eps)
    inverse = fill(np.float32(1)) / square_root(fill(mean))
    for c in range(0, width, LANES):
        store(normed, at + c, load(x, at + c) * inverse * load(weight, c))


@kernel
def norm_into(x, out, normed, weight, rows, width, adds, out_scale, eps):
    """Add `out`, times `out_scale`, to rows of `x` in place, if it `adds`; write x / √(mean(x²) + eps) · weight.

    x is rounded to its own type before it is normed. `x`, `out` and `normed` are [rows, width], the width a multiple
    of 16.
    """
    if rows * width <= MAX_SINGLE_THREAD_CHANNELS:
        for row in range(rows):
            _norm_row(x, out, normed, weight, row * width, width, adds, out_scale, eps)
    else:
        for row in prange(rows):
            _norm_row(x, out, normed, weight, row * width, width, adds, out_scale, eps)

"""The residual stream: embedded tokens, the sum of a stream and a layer's output, and the norm of that sum.

A row is computed by one thread, in the order of its channels. Arrays are flat, see `arrays.py`. Embedded rows come from
a table, or from panels of a head; bfloat16 becomes float32 by 16 zero bits.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, part, serial_kernel
from headwater.kernels.tile import PANEL
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


@serial_kernel
def copy_rows_into(out, table, index, width):
    """Write rows of a table [rows, width]; `out` and `table` have elements of one type."""
    for i in range(len(index)):
        for c in range(width):
            out[i * width + c] = table[index[i] * width + c]


@serial_kernel
def widen_rows_into(out, table, index, width):
    """Write rows of a table of bfloat16 (int16) as float32 (int32)."""
    for i in range(len(index)):
        for c in range(width):
            out[i * width + c] = table[index[i] * width + c] << 16


@serial_kernel
def widen_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as float32 (int32); `width` is even."""
    for i in range(len(index)):
        at = index[i] // PANEL * (width // 2) * PANEL + index[i] % PANEL
        for c in range(0, width, 2):
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair << 16
            out[i * width + c + 1] = pair & -65536


@serial_kernel
def copy_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as bfloat16 (int16); `width` is even."""
    for i in range(len(index)):
        at = index[i] // PANEL * (width // 2) * PANEL + index[i] % PANEL
        for c in range(0, width, 2):
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair & 0xFFFF
            out[i * width + c + 1] = pair >> 16

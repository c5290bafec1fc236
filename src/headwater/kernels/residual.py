"""The residual stream: embedded tokens, the sum of a stream and a layer's output, and the norm of that sum.

A row is computed by one thread, in the order of its channels. Arrays are flat, see `arrays.py`. Embedded rows come from
a table, or from panels of a head: bfloat16, which becomes float32 by 16 zero bits, or codes of integers.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from headwater.kernels.compiling import kernel, lean_part, part, serial_kernel
from headwater.kernels.tile import PANEL
from headwater.kernels.vectors import LANES, fill, fma, load, prefetch, square_root, store, sum_lanes

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


@lean_part
def _first_of(index, i, steps):
    """Return the place of row index[i], or of the last one, in panels that have `steps` elements of an output.

    Elements of a row are PANEL apart, which the processor does not foresee: kernels prefetch those of the next row.
    """
    row = index[min(i, len(index) - 1)]
    return row // PANEL * steps * PANEL + row % PANEL


@serial_kernel
def widen_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as float32 (int32); `width` is even."""
    for i in range(len(index)):
        at, following = _first_of(index, i, width // 2), _first_of(index, i + 1, width // 2)
        for c in range(0, width, 2):
            prefetch(panels, following + c // 2 * PANEL)
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair << 16
            out[i * width + c + 1] = pair & -65536


@serial_kernel
def copy_panel_rows_into(out, panels, index, width):
    """Write rows of a weight in panels of pairs of bfloat16 (int32) as bfloat16 (int16); `width` is even."""
    for i in range(len(index)):
        at, following = _first_of(index, i, width // 2), _first_of(index, i + 1, width // 2)
        for c in range(0, width, 2):
            prefetch(panels, following + c // 2 * PANEL)
            pair = panels[at + c // 2 * PANEL]
            out[i * width + c] = pair & 0xFFFF
            out[i * width + c + 1] = pair >> 16


@serial_kernel
def values_of_codes_into(out, codes, index, scale, zero, minimum, numbers, steps):
    """Write rows of a weight in panels as float32: scale · (number − zero) − minimum, each operation rounded.

    Scales, zeros and minimums are those of groups of these rows; a code is the index of its number. An element of
    `codes`, of which an output has `steps`, holds four codes of a byte each, or eight of 4 bits: the first four in the
    lower halves of its bytes.
    """
    n_groups, halves, mask = len(scale) // max(1, len(index)), 1 if len(numbers) == 256 else 2, len(numbers) - 1
    for i in range(len(index)):
        at, following = _first_of(index, i, steps), _first_of(index, i + 1, steps)
        for step in range(steps):
            prefetch(codes, following + step * PANEL)
            word, g = codes[at + step * PANEL], i * n_groups + step * n_groups // steps
            s, z, m = scale[g], zero[g], minimum[g]
            for half in range(halves):
                to, four = ((i * steps + step) * halves + half) * 4, word >> 4 * half
                out[to] = (numbers[four & mask] - z) * s - m
                out[to + 1] = (numbers[four >> 8 & mask] - z) * s - m
                out[to + 2] = (numbers[four >> 16 & mask] - z) * s - m
                out[to + 3] = (numbers[four >> 24 & mask] - z) * s - m

"""Products with weights in panels of 64 outputs: y = then(x Wᵀ + b) · factor.

A sum is one chain of fused multiply-adds over the inputs in their order, in float32, at any number of rows and threads.
So a row's bits depend only on the row, and rows of prompts and of answers have the same bits. If the processor has AMX,
bfloat16 is multiplied by bfloat16 32 inputs at a time (`kernels/amx.py`).

Weights in float32 and bfloat16 are multiplied as they are held. Others are widened to float32 a block of inputs at a
time, which many rows then share; so are these two for many rows on processors with registers of 256 bits. float8 is
unpacked in registers for few rows (`kernels/float8.py`).

R rows, K inputs, N outputs.
"""

from __future__ import annotations

import numpy as np
from numba import get_thread_id, prange, types
from numba.core.extending import overload

from headwater.kernels import amx
from headwater.kernels.compiling import kernel, lean_part
from headwater.kernels.float8 import KINDS, add_float8, elements, round_float8, widen_float8
from headwater.kernels.functions import sigmoid, silu
from headwater.kernels.tile import BLOCK, HEIGHTS, LINES, PANEL, ROWS, VECTORS, fetching_tile_of, tile_of
from headwater.kernels.vectors import LANES, load, lower_half, store, upper_half

LINEAR, SILU, SIGMOID = range(3)  # activations
ROWS_PER_PASS = 256  # rows for each panel in turn: they and their sums fit in a level-2 cache

tile_1, tile_2, tile_4, tile_6 = map(tile_of, HEIGHTS)
fetching_tile_6 = fetching_tile_of(ROWS)
widened_1, widened_2, widened_4, widened_6 = (tile_of(rows, True) for rows in HEIGHTS)


@lean_part
def _some_rows(rows, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh):
    """Add the products of 1 to 6 rows to their sums; for arguments see `tile_of`."""
    if rows == 6:
        tile_6(x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh)
        return
    r = rows & 4
    if r:
        tile_4(x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh)
    if rows & 2:
        tile_2(x, x_at + r * x_row, x_row, x_step, w, w_at, steps, total, total_at + r * PANEL, fresh)
        r += 2
    if rows & 1:
        tile_1(x, x_at + r * x_row, x_row, x_step, w, w_at, steps, total, total_at + r * PANEL, fresh)


@lean_part
def some_rows_of_many(rows, before, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh):
    """Add the products of 1 to 6 rows, which `before` others preceded, to their sums; for arguments see `tile_of`.

    Weights are read from memory for the first 6 rows of a block. Tiles of the next ones, which compute with weights in
    the cache, ask for the next block meanwhile: each for other cache lines of its weights.
    """
    line = (before // ROWS - 1) * LINES
    if rows == 6 and 0 <= line < VECTORS:
        ahead = steps * PANEL + line * LANES
        fetching_tile_6(x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh, ahead)
    else:
        _some_rows(rows, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh)


@lean_part
def _some_widened(rows, x, x_at, x_row, w, w_at, steps, total, total_at, fresh):
    """Do the same with a block of weights that were widened."""
    if rows == 6:
        widened_6(x, x_at, x_row, 1, w, w_at, steps, total, total_at, fresh)
        return
    r = rows & 4
    if r:
        widened_4(x, x_at, x_row, 1, w, w_at, steps, total, total_at, fresh)
    if rows & 2:
        widened_2(x, x_at + r * x_row, x_row, 1, w, w_at, steps, total, total_at + r * PANEL, fresh)
        r += 2
    if rows & 1:
        widened_1(x, x_at + r * x_row, x_row, 1, w, w_at, steps, total, total_at + r * PANEL, fresh)


@lean_part
def finish(scratch, total_at, rows, first, n_outputs, bias, then, factor, factor_row, y, y_row):
    """Write the sums of a panel as outputs [first, first + 64) of y, up to the last one of y."""
    for r in range(rows):
        for v in range(first, min(first + PANEL, n_outputs), LANES):
            sums = load(scratch, total_at + r * PANEL + v - first)
            if len(bias):
                sums = sums + load(bias, v)
            if then == SILU:
                sums = silu(sums)
            elif then == SIGMOID:
                sums = sigmoid(sums)
            if factor_row:
                sums = sums * load(factor, r * factor_row + v)
            store(y, r * y_row + v, sums)


@lean_part
def _widen_floats(weights, p, n_inputs, first, last, out, at):
    """Copy the weights of inputs [first, last) of panel p to a block."""
    for k in range(first, last):
        for v in range(VECTORS):
            source = (p * n_inputs + k) * PANEL + v * LANES
            store(out, at + (v * BLOCK + k - first) * LANES, load(weights[0], source))


@lean_part
def _widen_pairs(weights, p, n_inputs, first, last, out, at):
    """Widen the weights of inputs [first, last) of panel p, both even, to a block."""
    for k in range(first, last, 2):
        for v in range(VECTORS):
            source = (p * n_inputs + k) // 2 * PANEL + v * LANES
            to = at + (v * BLOCK + k - first) * LANES
            store(out, to, lower_half(weights[0], source))
            store(out, to + LANES, upper_half(weights[0], source))


def _widen(x, weights, p, n_inputs, first, last, out, at):
    """Write the weights of inputs [first, last) of panel p, both even, to a block, as products with x take them.

    `overload` tells formats apart.
    """


@overload(_widen)
def _widen_by_format(x, weights, p, n_inputs, first, last, out, at):
    if weights[0].dtype in KINDS:
        widen = round_float8 if x.dtype == types.int32 else widen_float8
    else:
        widen = _widen_pairs if weights[0].dtype == types.int32 else _widen_floats
    return lambda x, weights, p, n_inputs, first, last, out, at: widen(weights, p, n_inputs, first, last, out, at)


@kernel
def multiply(x, x_row, x_step, weights, steps, bias, then, factor, factor_row, y, y_row, rows, n_outputs, scratch):
    """Multiply by weights as they are held. A step is one input, or two side by side; `x_step` elements of x."""
    for p in prange((n_outputs + PANEL - 1) // PANEL):
        total_at = get_thread_id() * rows * PANEL
        for step in range(0, steps, BLOCK):
            n = min(BLOCK, steps - step)
            for r in range(0, rows, ROWS):
                x_at, w_at = r * x_row + step * x_step, (p * steps + step) * PANEL
                some, sums = min(ROWS, rows - r), total_at + r * PANEL
                some_rows_of_many(some, r, x, x_at, x_row, x_step, weights[0], w_at, n, scratch, sums, step == 0)
        finish(scratch, total_at, rows, p * PANEL, n_outputs, bias, then, factor, factor_row, y, y_row)


@kernel
def multiply_by_amx(
    x, x_row, _x_step, weights, steps, bias, then, factor, factor_row, y, y_row, rows, n_outputs, scratch
):
    """Multiply bfloat16 by bfloat16; a step is two inputs side by side, and steps are whole runs of AMX."""
    panels = (n_outputs + PANEL - 1) // PANEL
    for t in prange((rows + ROWS_PER_PASS - 1) // ROWS_PER_PASS * panels):
        p, first = np.int64(t) % panels, np.int64(t) // panels * ROWS_PER_PASS
        some, total_at = min(ROWS_PER_PASS, rows - first), get_thread_id() * min(ROWS_PER_PASS, rows) * PANEL
        amx.write_sums(x, first * x_row, x_row, weights[0], p * steps * PANEL, steps, some, scratch, total_at)
        by, out = factor[first * factor_row :], y[first * y_row :]
        finish(scratch, total_at, some, p * PANEL, n_outputs, bias, then, by, factor_row, out, y_row)


@kernel
def widen_and_multiply(
    x, x_row, x_step, weights, n_inputs, bias, then, factor, factor_row, y, y_row, rows, n_outputs, scratch
):
    """Multiply by weights that are widened to float32, or to bfloat16 for rows of it, a block of inputs at a time."""
    for p in prange((n_outputs + PANEL - 1) // PANEL):
        block_at = get_thread_id() * (rows + BLOCK) * PANEL
        total_at = block_at + BLOCK * PANEL
        for k in range(0, n_inputs, BLOCK):
            n = min(BLOCK, n_inputs - k)
            _widen(x, weights, p, n_inputs, k, k + n, scratch, block_at)
            steps, first = elements(x, n), elements(x, k)
            for r in range(0, rows, ROWS):
                some, sums = min(ROWS, rows - r), total_at + r * PANEL
                _some_widened(some, x, r * x_row + first, x_row, scratch, block_at, steps, scratch, sums, k == 0)
        finish(scratch, total_at, rows, p * PANEL, n_outputs, bias, then, factor, factor_row, y, y_row)


@kernel
def multiply_float8(
    x, x_row, x_step, weights, n_inputs, bias, then, factor, factor_row, y, y_row, rows, n_outputs, scratch
):
    """Multiply 1 to 6 rows by weights in float8, which are unpacked in registers."""
    for p in prange((n_outputs + PANEL - 1) // PANEL):
        total_at = get_thread_id() * rows * PANEL
        add_float8(x, 0, x_row, weights, np.int64(p), n_inputs, rows, scratch, total_at)
        finish(scratch, total_at, rows, p * PANEL, n_outputs, bias, then, factor, factor_row, y, y_row)

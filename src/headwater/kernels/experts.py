"""Products of rows with the weights of their experts, which lie in panels, one expert after the other.

Rows are in the order of experts (`kernels/routing.py`), so an expert's weights are read once for all of its rows. A sum
is the chain of `kernels/product.py`: a row has the bits of a product with only its expert.

R rows, K inputs, N outputs, a multiple of 64, E experts.
"""

from __future__ import annotations

import numpy as np
from numba import get_thread_id, prange, types
from numba.core.extending import overload

from headwater.kernels import amx
from headwater.kernels.compiling import kernel, part
from headwater.kernels.float8 import KINDS, add_float8, elements
from headwater.kernels.integers import add_panel, round_row, span_of
from headwater.kernels.product import _some_widened, _widen, finish, some_rows_of_many
from headwater.kernels.tile import BLOCK, PANEL, ROWS, WIDE

MAX_ROWS_PER_THREAD = 128  # of one expert, whose sums a thread holds at a time
BY_AMX = amx.usable()
MAX_UNCONVERTED_ROWS = MAX_ROWS_PER_THREAD if WIDE else ROWS  # of an expert, for which weights are not widened first


@part
def _add_widened(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
    """Write the sums of some rows, with weights widened to float32 a block of inputs at a time."""
    total_at = block_at + BLOCK * PANEL
    for k in range(0, n_inputs, BLOCK):
        n = min(BLOCK, n_inputs - k)
        _widen(x, weights, panel, n_inputs, k, k + n, scratch, block_at)
        steps, first = elements(x, n), x_at + elements(x, k)
        for r in range(0, rows, ROWS):
            some, sums = min(ROWS, rows - r), total_at + r * PANEL
            _some_widened(some, x, first + r * x_row, x_row, scratch, block_at, steps, scratch, sums, k == 0)


@part
def _add_as_held(x, x_at, x_row, x_step, weights, panel, steps, rows, scratch, total_at):
    """Write the sums of some rows; a step is one input, or two side by side, and `x_step` elements of x."""
    for step in range(0, steps, BLOCK):
        n, w_at = min(BLOCK, steps - step), (panel * steps + step) * PANEL
        for r in range(0, rows, ROWS):
            some, at, sums = min(ROWS, rows - r), x_at + r * x_row + step * x_step, total_at + r * PANEL
            some_rows_of_many(some, r, x, at, x_row, x_step, weights[0], w_at, n, scratch, sums, step == 0)


@part
def _add_float8(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
    """Write the sums of some rows, with weights unpacked in registers for few and to a block for more."""
    if rows > ROWS:
        _add_widened(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at)
    else:
        add_float8(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at + BLOCK * PANEL)


@part
def _add_bfloat16(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
    """Write the sums of some rows in bfloat16, by AMX if the processor has it and inputs are whole runs of it."""
    steps, total_at = n_inputs // 2, block_at + BLOCK * PANEL
    if BY_AMX and n_inputs % amx.RUN == 0:
        amx.write_sums(x, x_at, x_row, weights[0], panel * steps * PANEL, steps, rows, scratch, total_at)
    else:
        _add_as_held(x, x_at, x_row, 1, weights, panel, steps, rows, scratch, total_at)


def _add(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
    """Write the sums of some rows for a panel of weights; `overload` tells formats apart."""


@overload(_add)
def _add_by_format(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
    if weights[0].dtype in KINDS:
        return lambda x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at: _add_float8(
            x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at
        )
    if weights[0].dtype not in (types.int32, types.float32):
        return lambda x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at: _add_widened(
            x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at
        )
    if x.dtype == types.int32:
        return lambda x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at: _add_bfloat16(
            x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at
        )
    together = 2 if weights[0].dtype == types.int32 else 1

    def add(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at):
        if rows > MAX_UNCONVERTED_ROWS:
            _add_widened(x, x_at, x_row, weights, panel, n_inputs, rows, scratch, block_at)
        else:
            steps, total_at = n_inputs // together, block_at + BLOCK * PANEL
            _add_as_held(x, x_at, x_row, together, weights, panel, steps, rows, scratch, total_at)

    return add


@kernel
def multiply_into(
    y, y_row, x, x_row, weights, n_inputs, n_outputs, then, factor, factor_row, begins, chosen, bias, scratch
):
    """Write then(x Wᵀ + b) · factor for rows in the order of experts.

    Expert e has the rows from begins[e] to begins[e + 1]; chosen[0] experts, those that follow in `chosen`, have any.
    `bias` is [E, N], or has no elements. `scratch` has room for 128 rows and a block of weights for each thread.
    """
    panels = (n_outputs + PANEL - 1) // PANEL
    for t in prange(chosen[0] * panels):
        e, p = chosen[1 + t // panels], t % panels
        block_at = get_thread_id() * (MAX_ROWS_PER_THREAD + BLOCK) * PANEL
        for first in range(begins[e], begins[e + 1], MAX_ROWS_PER_THREAD):
            rows = min(MAX_ROWS_PER_THREAD, begins[e + 1] - first)
            _add(x, first * x_row, x_row, weights, e * panels + p, n_inputs, rows, scratch, block_at)
            total_at, out, by = block_at + BLOCK * PANEL, y[first * y_row :], factor[first * factor_row :]
            of_expert = bias[e * n_outputs :]
            finish(scratch, total_at, rows, p * PANEL, n_outputs, of_expert, then, by, factor_row, out, y_row)


@kernel
def multiply_integers_into(
    y, y_row, x, x_row, weights, n_inputs, n_outputs, then, factor, factor_row, begins, chosen, bias, scratch
):
    """Do the same with weights of 2 to 8 bits (`kernels/integers.py`)."""
    panels, n, span = (n_outputs + PANEL - 1) // PANEL, begins[len(begins) - 1], span_of(n_inputs // weights[6])
    spans = n_inputs // span
    rounded = np.empty(n * n_inputs, np.int8)
    scales, totals = np.empty(n * spans, np.float32), np.empty(n * spans, np.float32)
    for r in prange(n):
        round_row(x, r * x_row, n_inputs, span, rounded, r * n_inputs, scales, totals, r * spans)
    for t in prange(chosen[0] * panels):
        e, p = chosen[1 + t // panels], t % panels
        at = get_thread_id() * (MAX_ROWS_PER_THREAD + BLOCK) * PANEL
        for first in range(begins[e], begins[e + 1], MAX_ROWS_PER_THREAD):
            rows = min(MAX_ROWS_PER_THREAD, begins[e + 1] - first)
            out, by, of_expert = y[first * y_row :], factor[first * factor_row :], bias[e * n_outputs :]
            sums_at = add_panel(
                rounded, scales, totals, first, rows, weights, e * panels + p, n_inputs, span, scratch, at
            )
            finish(scratch, sums_at, rows, p * PANEL, n_outputs, of_expert, then, by, factor_row, out, y_row)

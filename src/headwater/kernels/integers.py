"""Products with weights of 2 to 8 bits: rows are rounded to int8, and integers are multiplied and summed exactly.

A code of 4 bits may stand for one of 16 bytes, which is looked up in registers before it is multiplied.

A span is at most 128 inputs that share a row's scale and lie in one group of the weight. The sum of a span is an
integer, so its order does not matter; spans are added in float32, in their order. So a row's bits depend only on
the row, and are the same on every processor. With AMX 16 rows are multiplied at a time,
and the remaining rows by the processor's dot product (`kernels/integer_tile.py`).

R rows, K inputs, N outputs.
"""

from __future__ import annotations

import numpy as np
from numba import get_thread_id, prange, types

from headwater.kernels import amx
from headwater.kernels.compiling import kernel, lean_part
from headwater.kernels.instructions import FLOATS, INTS, LANES, address, intrinsic
from headwater.kernels.integer_tile import TABLE, add_some_rows, bytes_of_codes, dots_of_row, table_at, write_group
from headwater.kernels.product import finish
from headwater.kernels.tile import BLOCK as TILE_BLOCK
from headwater.kernels.tile import INDEX, PANEL, ROWS, VECTORS
from headwater.kernels.vectors import (
    f32x16,
    fill,
    fma,
    load,
    load_some,
    max_lanes,
    maximum,
    nearest,
    spread,
    store,
    store_some,
    sum_lanes,
)

USABLE = amx.usable_for_bytes()


@intrinsic
def _load_ints(_, array, index):
    """Convert 16 int32, stored as float32, to float32."""

    def lower(context, builder, signature, arguments):
        pointer = address(context, builder, signature.args[0], *arguments)
        return builder.sitofp(builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4), FLOATS)

    return f32x16(array, types.intp), lower


@intrinsic
def _unpack(_, codes, index, table, t_at, out, out_at):
    """Write 16 times eight codes of 4 bits as two lines of 16 times four codes of 8 bits, 64 elements apart."""

    def lower(context, builder, signature, arguments):
        codes, index, tables, t_at, out, out_at = arguments
        pointer = address(context, builder, signature.args[0], codes, index)
        eight = builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4)
        to = builder.bitcast(address(context, builder, signature.args[4], out, out_at), INTS.as_pointer())
        table = table_at(context, builder, signature.args[2], tables, t_at)
        for half, four in enumerate(bytes_of_codes(builder, eight, table)):
            builder.store(four, builder.gep(to, [INDEX(half * VECTORS)]), align=4)
        return context.get_dummy_value()

    return types.none(codes, types.intp, table, types.intp, out, types.intp), lower


@lean_part
def _add_tiles(x, x_at, n_inputs, span, scales, totals, row, spans, s, w, w_at, rows, scratch, of_w, sums, has_minimum):
    """Add the products of rows, a multiple of 16, with a span of a panel to their sums, by AMX.

    `w` has four codes of an output side by side; `row` is the first one's number, and s the span's. The dots are
    written behind the scales of the outputs, which begin at `of_w`.
    """
    run = min(span, amx.LINE)
    dots = of_w + 3 * PANEL
    for r in range(0, rows, amx.HEIGHT):
        amx.write_dots(x, x_at + r * n_inputs, n_inputs, w, w_at, run, span // run, scratch, dots)
        for i in range(amx.HEIGHT):
            of_row = (row + r + i) * spans + s
            scale, total = spread(scales, of_row), spread(totals, of_row)
            for v in range(0, PANEL, LANES):
                to = sums + (r + i) * PANEL + v
                exact = fma(load(scratch, of_w + PANEL + v), total, _load_ints(scratch, dots + i * PANEL + v))
                end = fma(exact, load(scratch, of_w + v) * scale, load(scratch, to))
                if has_minimum:
                    end = fma(load(scratch, of_w + 2 * PANEL + v), scale * total, end)
                store(scratch, to, end)


@lean_part
def _add_with_amx(x, scales, totals, first, rows, weights, p, n_inputs, span, n_zeros, steps, scratch, at, sums):
    """Add the products of whole sixteens of rows with a panel to their sums, a span at a time; return how many rows."""
    rows -= rows % amx.HEIGHT
    if rows == 0 or span not in (16, 32, 64, 128):
        return 0
    code, _, _, minimum, _, _, n_groups, table = weights
    spans, packed_at = n_inputs // span, at + (3 + amx.HEIGHT) * PANEL
    is_packed = steps * 4 < span  # eight codes to an element
    amx.configure_bytes(min(span, amx.LINE))
    for s in range(spans):
        write_group(weights, p, s * n_groups // spans, n_zeros, scratch, at)
        w_at, to = (p * spans + s) * steps * PANEL, sums
        if is_packed:
            for step in range(steps):
                for v in range(0, PANEL, LANES):
                    _unpack(code, w_at + step * PANEL + v, table, p * TABLE, scratch, packed_at + 2 * step * PANEL + v)
            _add_tiles(
                x, first * n_inputs + s * span, n_inputs, span, scales, totals, first, spans, s,
                scratch, packed_at, rows, scratch, at, to, len(minimum) > 0,
            )  # fmt: skip
        else:
            _add_tiles(
                x, first * n_inputs + s * span, n_inputs, span, scales, totals, first, spans, s,
                code, w_at, rows, scratch, at, to, len(minimum) > 0,
            )  # fmt: skip
    amx.release()
    return rows


@lean_part
def _add_none(x, scales, totals, first, rows, weights, p, n_inputs, span, n_zeros, steps, scratch, at, sums):
    """Return 0: no row is multiplied by tiles of AMX."""
    return 0


add_sixteens = _add_with_amx if USABLE else _add_none  # LLVM has no code for the former without AMX


MAX_SPAN = 128  # inputs, whose products of 8 bits have an exact sum in float32
BLOCK = 512  # inputs of a panel that all rows are multiplied by before the next: 32 KB at 8 bits
LARGEST = 127  # of a rounded row
ZERO_SPAN = 1e-30  # a span counts as zeros if its largest value is at most this
# rows that are multiplied by one panel after the other: 32 KB of sums
ROWS_PER_PASS = 128 if USABLE else 2**30


@lean_part
def round_row(x, x_at, n_inputs, span, codes, at, scales, totals, span_at):
    """Round a row to int8: x ≈ scale · code, the largest |code| of a span is 127. Write scales and sums of codes."""
    nothing = fill(np.float32(0))
    for s in range(n_inputs // span):
        first, largest, total = s * span, nothing, nothing
        for c in range(first, first + span, LANES):
            some = load_some(x, x_at + c, first + span - c)
            largest = maximum(largest, maximum(some, nothing - some))
        most = max_lanes(largest)
        factor = np.float32(LARGEST) / most if most > np.float32(ZERO_SPAN) else np.float32(0)
        for c in range(first, first + span, LANES):
            code = nearest(load_some(x, x_at + c, first + span - c) * fill(factor))
            store_some(codes, at + c, code, first + span - c)
            total = total + code
        scales[span_at + s] = most * np.float32(1 / LARGEST) if factor > 0 else np.float32(0)
        totals[span_at + s] = sum_lanes(total)


@lean_part
def span_of(group):
    """Return the inputs of a span, for groups of `group` inputs."""
    span = group
    while span > MAX_SPAN or group % span:
        span -= 8
    return span


@lean_part
def _with_span(sums, dots, scale, total, weights, p, g, n_zeros, v):
    """Return the sums of 16 outputs with those of a span added, as a tile adds them."""
    _, of_w, zero, minimum, outer_scale, outer_minimum, n_groups, _ = weights
    inner = p * n_groups + g
    outer = inner * len(outer_scale) // len(of_w) if len(outer_scale) else 0
    s, nothing = load(of_w, inner * PANEL + v), fill(np.float32(0))
    if len(outer_scale):
        s = load(outer_scale, outer * PANEL + v) * s
    minus_zero = nothing - load(zero, (p if n_zeros == 1 else inner) * PANEL + v)
    sums = fma(fma(minus_zero, total, dots), s * scale, sums)
    if len(minimum):
        m = load(minimum, inner * PANEL + v)
        m = load(outer_minimum, outer * PANEL + v) * m if len(outer_minimum) else m
        sums = fma(nothing - m, scale * total, sums)
    return sums


@lean_part
def _add_row(x, scales, totals, row, weights, p, n_inputs, span, n_zeros, steps, sums, at):
    """Write the sums of one row for a panel. They stay in registers, and scales are read as they are held."""
    spans, spans_of_group = n_inputs // span, n_inputs // weights[6] // span
    sum_0 = sum_1 = sum_2 = sum_3 = fill(np.float32(0))
    for s in range(spans):
        g = s if spans_of_group == 1 else s // spans_of_group
        x_at, w_at = row * n_inputs + s * span, (p * spans + s) * steps * PANEL
        dots_0, dots_1, dots_2, dots_3 = dots_of_row(x, x_at, weights[0], w_at, weights[7], p * TABLE, steps)
        scale, total = spread(scales, row * spans + s), spread(totals, row * spans + s)
        sum_0 = _with_span(sum_0, dots_0, scale, total, weights, p, g, n_zeros, 0)
        sum_1 = _with_span(sum_1, dots_1, scale, total, weights, p, g, n_zeros, LANES)
        sum_2 = _with_span(sum_2, dots_2, scale, total, weights, p, g, n_zeros, 2 * LANES)
        sum_3 = _with_span(sum_3, dots_3, scale, total, weights, p, g, n_zeros, 3 * LANES)
    store(sums, at, sum_0)
    store(sums, at + LANES, sum_1)
    store(sums, at + 2 * LANES, sum_2)
    store(sums, at + 3 * LANES, sum_3)


@lean_part
def add_panel(rounded, scales, totals, first, rows, weights, p, n_inputs, span, scratch, at):
    """Write the sums of rows from `first` on for a panel to scratch, from `at` on; return where they begin."""
    code, scale, zero, minimum, _, _, n_groups, table = weights
    spans, spans_of_group, n_zeros = n_inputs // span, n_inputs // n_groups // span, len(zero) * n_groups // len(scale)
    per_step = n_inputs * len(scale) // n_groups // len(code)  # inputs
    steps, in_block = span // per_step, max(1, BLOCK // max(span, 16))
    sums_at = at + max(3 * in_block, 3 + amx.HEIGHT + span // 4) * PANEL
    together = rows - rows % 2
    if together < rows:
        to = sums_at + together * PANEL
        _add_row(rounded, scales, totals, first + together, weights, p, n_inputs, span, n_zeros, steps, scratch, to)
    for i in range(sums_at, sums_at + together * PANEL, LANES):
        store(scratch, i, fill(np.float32(0)))
    by_tiles = add_sixteens(
        rounded, scales, totals, first, rows, weights, p, n_inputs, span, n_zeros, steps, scratch, at, sums_at
    )
    for block in range(0, spans if together > by_tiles else 0, in_block):
        end = min(spans, block + in_block)
        for s in range(block, end):
            g = s if spans_of_group == 1 else s // spans_of_group
            write_group(weights, p, g, n_zeros, scratch, at + (s - block) * 3 * PANEL)
        for r in range(by_tiles, together, ROWS):
            some, to, row = min(ROWS, together - r), sums_at + r * PANEL, first + r
            for s in range(block, end):
                w_at, of_w_at = (p * spans + s) * steps * PANEL, at + (s - block) * 3 * PANEL
                add_some_rows(
                    some, rounded, row * n_inputs + s * span, n_inputs, scales, totals, row * spans + s, spans,
                    code, w_at, table, p * TABLE, steps, scratch, of_w_at, len(minimum) > 0, scratch, to,
                )  # fmt: skip
    return sums_at


@kernel
def multiply_integers(
    x, x_row, x_step, weights, n_inputs, bias, then, factor, factor_row, y, y_row, rows, n_outputs, scratch
):
    """Multiply by weights of 2 to 8 bits; an input of a row is an element of x."""
    span = span_of(n_inputs // weights[6])
    spans = n_inputs // span
    rounded = np.empty(rows * n_inputs, np.int8)
    scales, totals = np.empty(rows * spans, np.float32), np.empty(rows * spans, np.float32)
    if rows == 1:
        round_row(x, 0, n_inputs, span, rounded, 0, scales, totals, 0)
    else:
        for r in prange(rows):
            round_row(x, r * x_row, n_inputs, span, rounded, r * n_inputs, scales, totals, r * spans)
    panels, at_once = (n_outputs + PANEL - 1) // PANEL, min(rows, ROWS_PER_PASS)
    for t in prange((rows + at_once - 1) // at_once * panels):
        p, first = np.int64(t) % panels, np.int64(t) // panels * at_once
        some, at = min(at_once, rows - first), get_thread_id() * (at_once + TILE_BLOCK) * PANEL
        sums_at = add_panel(rounded, scales, totals, first, some, weights, p, n_inputs, span, scratch, at)
        by, out = factor[first * factor_row :], y[first * y_row :]
        finish(scratch, sums_at, some, p * PANEL, n_outputs, bias, then, by, factor_row, out, y_row)

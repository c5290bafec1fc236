"""Products with weights of 2 to 8 bits: rows are rounded to int8, and integers are multiplied and summed exactly.

A span is at most 128 inputs that share a row's scale and lie in one group of the weight. The sum of a span is an
integer, so its order does not matter; spans are added in float32, in their order. So a row's bits depend on the row
alone, and on every processor they are the same. With AMX (`kernels/amx.py`) 16 rows are multiplied at a time, and those
that are left by the processor's dot product.

R rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_thread_id, prange, types
from numba.core import cgutils

from headwater import machine
from headwater.kernels import amx
from headwater.kernels.compiling import kernel, lean_part
from headwater.kernels.instructions import (
    FLOATS,
    INTS,
    LANES,
    address,
    called,
    filled,
    int_constant,
    intrinsic,
    multiply_added,
)
from headwater.kernels.product import finish
from headwater.kernels.tile import BLOCK as TILE_BLOCK
from headwater.kernels.tile import HEIGHTS, INDEX, PANEL, ROWS, VECTORS, vectors_at_once
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

MAX_SPAN = 128  # inputs: a sum of so many products of 8 bits is exact in float32
BLOCK = 512  # inputs of a panel that all rows are multiplied by before the next: 32 KB at 8 bits
LARGEST = 127  # of a rounded row
LEAST = 1e-30  # largest value of a span that is told apart from zeros
INT, FLOAT = ir.IntType(32), ir.FloatType()
NIBBLES = 0x0F0F0F0F
SHORTS_OF_INTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def _each(builder: ir.IRBuilder, of: ir.VectorType, operation: str, value: ir.Value, by: int) -> ir.Value:
    result: ir.Value = getattr(builder, operation)(builder.bitcast(value, of), ir.Constant(of, [by] * of.count))
    return result


class Dot:
    """The processor's sum of four products of 8 bits (AVX512-VNNI)."""

    @staticmethod
    def weights(builder: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
        return [codes]

    @staticmethod
    def inputs(builder: ir.IRBuilder, four: ir.Value) -> list[ir.Value]:
        return [four]

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: list[ir.Value], inputs: list[ir.Value]) -> ir.Value:
        return called(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, weights[0], inputs[0])


class Pairs:
    """The same with products of 16 bits that are added in pairs, of which every processor has some form."""

    @staticmethod
    def weights(builder: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
        return [
            _each(builder, SHORTS_OF_INTS, "and_", codes, 0xFF),
            _each(builder, SHORTS_OF_INTS, "lshr", codes, 8),
        ]

    @staticmethod
    def inputs(builder: ir.IRBuilder, four: ir.Value) -> list[ir.Value]:
        upper = _each(builder, SHORTS_OF_INTS, "shl", four, 8)
        return [_each(builder, SHORTS_OF_INTS, "ashr", one, 8) for one in (upper, four)]

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: list[ir.Value], inputs: list[ir.Value]) -> ir.Value:
        wide = ir.VectorType(INT, 2 * LANES)
        for weight, x in zip(weights, inputs, strict=True):
            products = builder.mul(builder.sext(weight, wide), builder.sext(x, wide))
            even, odd = (
                builder.shuffle_vector(
                    products, ir.Constant(wide, ir.Undefined), ir.Constant(INTS, list(range(first, 2 * LANES, 2)))
                )
                for first in (0, 1)
            )
            total = builder.add(total, builder.add(even, odd))
        return total


BY_TILES = amx.usable_for_bytes()
AT_ONCE = 128 if BY_TILES else 2**30  # rows that are multiplied by one panel after the other: 32 KB of sums
KIND: Any = Dot if machine.compiles("avx512_vnni") else Pairs


def tile_of(rows: int) -> Any:
    """Return the tile of so many rows: it adds the products with a span of inputs to its sums.

    Arguments: rounded rows (flat int8), index of the first, their stride; their scales and totals (flat float32), index
    of the first, their stride; codes (flat; int32: four of an output, uint32: eight), index of the first, steps of one
    element; scales, negative zeros and negative minimums of the outputs (flat float32, 64 each), index, whether there
    are minimums; sums (flat float32, 64 a row), index of the first.
    """

    @intrinsic
    def tile(_, x, x_at, x_row, scale, total, of_x_at, of_x_row, w, w_at, steps, of_w, of_w_at, shifted, sums, sums_at):
        eight = w.dtype == types.uint32

        def lower(context, builder, signature, arguments):
            def at(array, index, of):
                pointer = address(context, builder, signature.args[array], arguments[array], index)
                return builder.bitcast(pointer, of.as_pointer())

            _, x_at, x_row, _, _, of_x_at, of_x_row, _, w_at, steps, _, of_w_at, shifted, _, sums_at = arguments
            starts = [builder.add(x_at, builder.mul(x_row, INDEX(r))) for r in range(rows)]
            of_starts = [builder.add(of_x_at, builder.mul(of_x_row, INDEX(r))) for r in range(rows)]
            inputs, codes = [at(0, start, INT) for start in starts], at(7, w_at, INTS)
            span = [[filled(builder, builder.load(at(array, start, FLOAT))) for start in of_starts] for array in (3, 4)]
            of_outputs, to = at(10, of_w_at, FLOATS), at(13, sums_at, FLOATS)
            for first in range(0, VECTORS, vectors_at_once(rows)):
                some = range(first, first + vectors_at_once(rows))
                dots = _dots(builder, eight, inputs, codes, steps, some)
                _add(builder, dots, span, of_outputs, shifted, to)
            return context.get_dummy_value()

        index = types.intp
        kinds = (x, index, index, scale, total, index, index, w, index, index, of_w, index, types.boolean, sums, index)
        return types.none(*kinds), lower

    return tile


def _dots(builder, eight, first_xs, first_w, steps, vectors) -> dict[tuple[int, int], ir.Value]:
    """Emit the loop over steps for some vectors of the panel and all rows; return the sums by row and vector."""
    totals = {
        (r, v): cgutils.alloca_once_value(builder, int_constant(0)) for r in range(len(first_xs)) for v in vectors
    }
    for total in totals.values():
        builder.store(int_constant(0), total)
    with cgutils.for_range(builder, steps) as loop:
        at_w = builder.mul(loop.index, INDEX(VECTORS))
        weights = []
        for v in vectors:
            codes = builder.load(builder.gep(first_w, [builder.add(at_w, INDEX(v))]), align=4)
            parts = [codes]
            if eight:
                upper = builder.lshr(codes, int_constant(4))
                parts = [builder.and_(some, int_constant(NIBBLES)) for some in (codes, upper)]
            weights.append([KIND.weights(builder, some) for some in parts])
        for r, first_x in enumerate(first_xs):
            for half in range(2 if eight else 1):
                at_x = builder.add(builder.mul(loop.index, INDEX(2 if eight else 1)), INDEX(half))
                four = filled(builder, builder.load(builder.gep(first_x, [at_x]), align=4))
                inputs = KIND.inputs(builder, four)
                for v, weight in zip(vectors, weights, strict=True):
                    total = totals[r, v]
                    builder.store(KIND.added(builder, builder.load(total), weight[half], inputs), total)
    return {at: builder.sitofp(builder.load(total), FLOATS) for at, total in totals.items()}


@intrinsic
def dots_of_row(_, x, x_at, w, w_at, steps):
    """Return the sums of products of a rounded row with a span of a panel; for arguments see `tile_of`."""
    eight = w.dtype == types.uint32

    def lower(context, builder, signature, arguments):
        x, x_at, w, w_at, steps = arguments
        inputs = builder.bitcast(address(context, builder, signature.args[0], x, x_at), INT.as_pointer())
        codes = builder.bitcast(address(context, builder, signature.args[2], w, w_at), INTS.as_pointer())
        dots = _dots(builder, eight, [inputs], codes, steps, range(VECTORS))
        return context.make_tuple(builder, signature.return_type, [dots[0, v] for v in range(VECTORS)])

    return types.UniTuple(f32x16, VECTORS)(x, types.intp, w, types.intp, types.intp), lower


def _add(builder, dots, span, of_outputs, shifted, to) -> None:
    """Emit the addition of a span's sums, times the scales of rows and weights, to those of the spans before."""

    def of_output(part, v):
        return builder.load(builder.gep(of_outputs, [INDEX(part * VECTORS + v)]), align=4)

    ends = {}
    for (r, v), dot in dots.items():
        scale, total = (part[r] for part in span)
        exact = multiply_added(builder, of_output(1, v), total, dot)
        pointer = builder.gep(to, [INDEX(r * VECTORS + v)])
        end = multiply_added(builder, exact, builder.fmul(of_output(0, v), scale), builder.load(pointer, align=4))
        builder.store(end, pointer, align=4)
        ends[r, v] = end, pointer
    with builder.if_then(shifted):
        for (r, v), (end, pointer) in ends.items():
            scale, total = (part[r] for part in span)
            end = multiply_added(builder, of_output(2, v), builder.fmul(scale, total), end)
            builder.store(end, pointer, align=4)


@intrinsic
def _load_ints(_, array, index):
    """Return 16 int32, in the place of float32, as float32."""

    def lower(context, builder, signature, arguments):
        pointer = address(context, builder, signature.args[0], *arguments)
        return builder.sitofp(builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4), FLOATS)

    return f32x16(array, types.intp), lower


@intrinsic
def _unpack(_, codes, index, out, out_at):
    """Write 16 times eight codes of 4 bits as two lines of 16 times four codes of 8 bits, 64 elements apart."""

    def lower(context, builder, signature, arguments):
        codes, index, out, out_at = arguments
        pointer = address(context, builder, signature.args[0], codes, index)
        eight = builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4)
        to = builder.bitcast(address(context, builder, signature.args[2], out, out_at), INTS.as_pointer())
        for half, four in enumerate((eight, builder.lshr(eight, int_constant(4)))):
            line = builder.gep(to, [INDEX(half * VECTORS)])
            builder.store(builder.and_(four, int_constant(NIBBLES)), line, align=4)
        return context.get_dummy_value()

    return types.none(codes, types.intp, out, types.intp), lower


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
    code, _, _, minimum, _, _, n_groups = weights
    spans, packed_at = n_inputs // span, at + (3 + amx.HEIGHT) * PANEL
    is_packed = steps * 4 < span  # eight codes to an element
    amx.configure_bytes(min(span, amx.LINE))
    for s in range(spans):
        _write_group(weights, p, s * n_groups // spans, n_zeros, scratch, at)
        w_at, to = (p * spans + s) * steps * PANEL, sums
        if is_packed:
            for step in range(steps):
                for v in range(0, PANEL, LANES):
                    _unpack(code, w_at + step * PANEL + v, scratch, packed_at + 2 * step * PANEL + v)
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


_add_by_tiles = _add_with_amx if BY_TILES else _add_none  # LLVM has no code for the former without AMX
tile_2, tile_4, tile_6 = (tile_of(rows) for rows in HEIGHTS if rows > 1)


@lean_part
def _some_rows(
    rows, x, x_at, x_row, scale, total, of_x_at, of_x_row, w, w_at, steps, of_w, of_w_at, shifted, sums, sums_at
):
    """Add the products of 2, 4 or 6 rows to their sums; for arguments see `tile_of`."""
    if rows == 6:
        tile_6(
            x, x_at, x_row, scale, total, of_x_at, of_x_row, w, w_at, steps, of_w, of_w_at, shifted, sums, sums_at
        )  # fmt: skip
    elif rows == 4:
        tile_4(
            x, x_at, x_row, scale, total, of_x_at, of_x_row, w, w_at, steps, of_w, of_w_at, shifted, sums, sums_at
        )  # fmt: skip
    else:
        tile_2(
            x, x_at, x_row, scale, total, of_x_at, of_x_row, w, w_at, steps, of_w, of_w_at, shifted, sums, sums_at
        )  # fmt: skip


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
        factor = np.float32(LARGEST) / most if most > np.float32(LEAST) else np.float32(0)
        for c in range(first, first + span, LANES):
            code = nearest(load_some(x, x_at + c, first + span - c) * fill(factor))
            store_some(codes, at + c, code, first + span - c)
            total = total + code
        scales[span_at + s] = most * np.float32(1 / LARGEST) if factor > 0 else np.float32(0)
        totals[span_at + s] = sum_lanes(total)


@lean_part
def _write_group(weights, p, g, n_zeros, out, at):
    """Write scales, negative zeros and negative minimums of a panel's outputs in group g, as `tile_of` reads them."""
    _, scale, zero, minimum, outer_scale, outer_minimum, n_groups = weights
    inner = p * n_groups + g
    outer = inner * len(outer_scale) // len(scale) if len(outer_scale) else 0
    z_at, nothing = (p if n_zeros == 1 else inner) * PANEL, fill(np.float32(0))
    for v in range(0, PANEL, LANES):
        s = load(scale, inner * PANEL + v)
        store(out, at + v, load(outer_scale, outer * PANEL + v) * s if len(outer_scale) else s)
        store(out, at + PANEL + v, nothing - load(zero, z_at + v))
        if len(minimum):
            m = load(minimum, inner * PANEL + v)
            m = load(outer_minimum, outer * PANEL + v) * m if len(outer_minimum) else m
            store(out, at + 2 * PANEL + v, nothing - m)


@lean_part
def span_of(group):
    """Return the inputs of a span, for groups of so many."""
    span = group
    while span > MAX_SPAN or group % span:
        span -= 8
    return span


@lean_part
def _with_span(sums, dots, scale, total, weights, p, g, n_zeros, v):
    """Return the sums of 16 outputs with those of a span added, as `_add` adds them."""
    _, of_w, zero, minimum, outer_scale, outer_minimum, n_groups = weights
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
        dots_0, dots_1, dots_2, dots_3 = dots_of_row(x, x_at, weights[0], w_at, steps)
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
    code, scale, zero, minimum, _, _, n_groups = weights
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
    by_tiles = _add_by_tiles(
        rounded, scales, totals, first, rows, weights, p, n_inputs, span, n_zeros, steps, scratch, at, sums_at
    )
    for block in range(0, spans if together > by_tiles else 0, in_block):
        end = min(spans, block + in_block)
        for s in range(block, end):
            g = s if spans_of_group == 1 else s // spans_of_group
            _write_group(weights, p, g, n_zeros, scratch, at + (s - block) * 3 * PANEL)
        for r in range(by_tiles, together, ROWS):
            some, to, row = min(ROWS, together - r), sums_at + r * PANEL, first + r
            for s in range(block, end):
                w_at, of_w_at = (p * spans + s) * steps * PANEL, at + (s - block) * 3 * PANEL
                _some_rows(
                    some, rounded, row * n_inputs + s * span, n_inputs, scales, totals, row * spans + s, spans,
                    code, w_at, steps, scratch, of_w_at, len(minimum) > 0, scratch, to,
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
    panels, at_once = (n_outputs + PANEL - 1) // PANEL, min(rows, AT_ONCE)
    for t in prange((rows + at_once - 1) // at_once * panels):
        p, first = np.int64(t) % panels, np.int64(t) // panels * at_once
        some, at = min(at_once, rows - first), get_thread_id() * (at_once + TILE_BLOCK) * PANEL
        sums_at = add_panel(rounded, scales, totals, first, some, weights, p, n_inputs, span, scratch, at)
        by, out = factor[first * factor_row :], y[first * y_row :]
        finish(scratch, sums_at, some, p * PANEL, n_outputs, bias, then, by, factor_row, out, y_row)

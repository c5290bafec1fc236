"""Tiles of AMX for products of int8 rows with codes of up to 8 bits: sixteen rows at a time, bits of other tiles.

The sum of a span is an integer, so it is that of `kernels/integer_tile.py`; scales are multiplied in the same order.
"""

from __future__ import annotations

from numba import types

from headwater.kernels import amx
from headwater.kernels.compiling import lean_part
from headwater.kernels.instructions import FLOATS, INTS, LANES, address, int_constant, intrinsic
from headwater.kernels.integer_tile import NIBBLES, write_group
from headwater.kernels.tile import INDEX, PANEL, VECTORS
from headwater.kernels.vectors import f32x16, fma, load, spread, store

USABLE = amx.usable_for_bytes()


@intrinsic
def _load_ints(_, array, index):
    """Convert 16 int32, stored as float32, to float32."""

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
        write_group(weights, p, s * n_groups // spans, n_zeros, scratch, at)
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


add_sixteens = _add_with_amx if USABLE else _add_none  # LLVM has no code for the former without AMX

"""Tiles of products of int8 rows with codes of up to 8 bits: sums of a span are integers, scales are float32.

A tile adds the products with a span of inputs, times the scales of rows and weights, to the float32 sums of the spans
before (`kernels/integers.py`).
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from headwater import machine
from headwater.kernels.compiling import lean_part
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
from headwater.kernels.tile import HEIGHTS, INDEX, PANEL, VECTORS, WIDE, vectors_at_once
from headwater.kernels.vectors import f32x16, fill, load, store

INT, FLOAT = ir.IntType(32), ir.FloatType()
NIBBLES = 0x0F0F0F0F
SHORTS_OF_INTS = ir.VectorType(ir.IntType(16), 2 * LANES)
TABLE = 16  # bytes, each of which a code of 4 bits stands for
IS_ARM = platform.machine() in ("aarch64", "arm64")
# the processor's lookup of several bytes in a table, and their number
if WIDE:
    LOOKUP, LOOKUPS = "llvm.x86.avx512.pshuf.b.512", 64
elif IS_ARM:
    LOOKUP, LOOKUPS = "llvm.aarch64.neon.tbl1.v16i8", 16
else:
    LOOKUP, LOOKUPS = "llvm.x86.avx2.pshuf.b", 32
# its products of bytes, and of 16 bits, that are added in pairs
ADDED_BYTES, ADDED_SHORTS = (
    ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
    if WIDE
    else ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
)


def _each(builder: ir.IRBuilder, of: ir.VectorType, operation: str, value: ir.Value, by: int) -> ir.Value:
    result: ir.Value = getattr(builder, operation)(builder.bitcast(value, of), ir.Constant(of, [by] * of.count))
    return result


def _bytes(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: range | list[int]) -> ir.Value:
    """Return some bytes of two vectors, by their numbers."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes)))


def table_at(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, index: ir.Value) -> ir.Value | None:
    """Load a table, repeated as often as a lookup takes it; None if the array is not of bytes."""
    if array.dtype != types.uint8:
        return None
    pointer = address(context, builder, array, value, index)
    table = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(8), TABLE).as_pointer()), align=1)
    return _bytes(builder, table, table, [*range(TABLE)] * (LOOKUPS // TABLE))


def _looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """Return the bytes of a table that 64 codes stand for."""
    code = builder.bitcast(codes, ir.VectorType(ir.IntType(8), 4 * LANES))
    parts = [
        called(builder, LOOKUP, table.type, table, _bytes(builder, code, code, range(at, at + LOOKUPS)))
        for at in range(0, 4 * LANES, LOOKUPS)
    ]
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        parts = [_bytes(builder, *pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return builder.bitcast(parts[0], INTS)


def bytes_of_codes(builder: ir.IRBuilder, codes: ir.Value, table: ir.Value | None) -> list[ir.Value]:
    """Return eight codes of 4 bits of 16 outputs as two vectors of four bytes, of a table if there is one."""
    halves = codes, builder.lshr(codes, int_constant(4))
    four = [builder.and_(some, int_constant(NIBBLES)) for some in halves]
    return four if table is None else [_looked_up(builder, table, some) for some in four]


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
        for weight, four in zip(weights, inputs, strict=True):
            total = called(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, weight, four)
        return total


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


class Nibbles(Dot):
    """The sums of `Pairs`, in half the instructions, for codes of 4 bits: 16 bits hold the sum of four products."""

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, weights: list[ir.Value], inputs: list[ir.Value]) -> ir.Value:
        at_once = LANES if WIDE else LANES // 2
        shorts, ints = (ir.VectorType(ir.IntType(bits), at_once * 32 // bits) for bits in (16, 32))
        of_bytes, parts = ir.VectorType(ir.IntType(8), 4 * at_once), []
        for first in range(0, LANES, at_once):
            pairs = (
                [builder.bitcast(_bytes(builder, some, some, range(first, first + at_once)), of_bytes) for some in both]
                for both in zip(weights, inputs, strict=True)
            )
            four = builder.add(*(called(builder, ADDED_BYTES, shorts, *pair) for pair in pairs))
            parts.append(called(builder, ADDED_SHORTS, ints, four, ir.Constant(shorts, [1] * shorts.count)))
        return builder.add(total, parts[0] if WIDE else _bytes(builder, parts[0], parts[1], range(LANES)))


KIND: Any = Dot if machine.compiles("avx512_vnni") else Pairs
KIND_OF_NIBBLES: Any = KIND if KIND is Dot or IS_ARM else Nibbles  # of eight codes that no table gives


def tile_of(rows: int) -> Any:
    """Return the tile of `rows` rows: it adds the products with a span of inputs to its sums.

    Arguments: rounded rows (flat int8), index of the first, their stride; their scales and totals (flat float32), index
    of the first, their stride; codes (flat; int32: four of an output, uint32: eight), index of the first; the bytes
    that codes stand for (flat uint8, 16; another type: none), index of the first; steps of one element; scales,
    negative zeros and negative minimums of the outputs (flat float32, 64 each), index, whether there are minimums; sums
    (flat float32, 64 a row), index of the first.
    """

    @intrinsic
    def tile(
        _, x, x_at, x_row, scale, total, of_x_at, of_x_row,
        w, w_at, table, t_at, steps, of_w, of_w_at, shifted, sums, sums_at,
    ):  # fmt: skip
        eight = w.dtype == types.uint32

        def lower(context, builder, signature, arguments):
            def at(array, index, of):
                pointer = address(context, builder, signature.args[array], arguments[array], index)
                return builder.bitcast(pointer, of.as_pointer())

            _, x_at, x_row, _, _, of_x_at, of_x_row, _, w_at, tables, t_at, steps, _, of_w_at, shifted, _, sums_at = (
                arguments
            )
            table = table_at(context, builder, signature.args[9], tables, t_at)
            starts = [builder.add(x_at, builder.mul(x_row, INDEX(r))) for r in range(rows)]
            of_starts = [builder.add(of_x_at, builder.mul(of_x_row, INDEX(r))) for r in range(rows)]
            inputs, codes = [at(0, start, INT) for start in starts], at(7, w_at, INTS)
            span = [[filled(builder, builder.load(at(array, start, FLOAT))) for start in of_starts] for array in (3, 4)]
            of_outputs, to = at(12, of_w_at, FLOATS), at(15, sums_at, FLOATS)
            for first in range(0, VECTORS, vectors_at_once(rows)):
                some = range(first, first + vectors_at_once(rows))
                dots = _dots(builder, eight, table, inputs, codes, steps, some)
                _add(builder, dots, span, of_outputs, shifted, to)
            return context.get_dummy_value()

        index = types.intp
        of_weights = (w, index, table, index, index, of_w, index, types.boolean)
        return types.none(x, index, index, scale, total, index, index, *of_weights, sums, index), lower

    return tile


def _dots(builder, eight, table, first_xs, first_w, steps, vectors) -> dict[tuple[int, int], ir.Value]:
    """Emit the loop over steps for some vectors of the panel and all rows; return the sums by row and vector."""
    totals = {
        (r, v): cgutils.alloca_once_value(builder, int_constant(0)) for r in range(len(first_xs)) for v in vectors
    }
    for total in totals.values():
        builder.store(int_constant(0), total)
    kind, halves = KIND_OF_NIBBLES if eight and table is None else KIND, 2 if eight else 1
    with cgutils.for_range(builder, steps) as loop:
        at_w = builder.mul(loop.index, INDEX(VECTORS))
        weights = []
        for v in vectors:
            codes = builder.load(builder.gep(first_w, [builder.add(at_w, INDEX(v))]), align=4)
            parts = bytes_of_codes(builder, codes, table) if eight else [codes]
            weights.append([one for some in parts for one in kind.weights(builder, some)])
        for r, first_x in enumerate(first_xs):
            inputs = []
            for half in range(halves):
                at_x = builder.add(builder.mul(loop.index, INDEX(halves)), INDEX(half))
                four = filled(builder, builder.load(builder.gep(first_x, [at_x]), align=4))
                inputs += kind.inputs(builder, four)
            for v, weight in zip(vectors, weights, strict=True):
                builder.store(kind.added(builder, builder.load(totals[r, v]), weight, inputs), totals[r, v])
    return {at: builder.sitofp(builder.load(total), FLOATS) for at, total in totals.items()}


@intrinsic
def dots_of_row(_, x, x_at, w, w_at, table, t_at, steps):
    """Return the sums of products of a rounded row with a span of a panel; for arguments see `tile_of`."""
    eight = w.dtype == types.uint32

    def lower(context, builder, signature, arguments):
        x, x_at, w, w_at, tables, t_at, steps = arguments
        table = table_at(context, builder, signature.args[4], tables, t_at)
        inputs = builder.bitcast(address(context, builder, signature.args[0], x, x_at), INT.as_pointer())
        codes = builder.bitcast(address(context, builder, signature.args[2], w, w_at), INTS.as_pointer())
        dots = _dots(builder, eight, table, [inputs], codes, steps, range(VECTORS))
        return context.make_tuple(builder, signature.return_type, [dots[0, v] for v in range(VECTORS)])

    index = types.intp
    return types.UniTuple(f32x16, VECTORS)(x, index, w, index, table, index, index), lower


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


tile_2, tile_4, tile_6 = (tile_of(rows) for rows in HEIGHTS if rows > 1)


@lean_part
def add_some_rows(
    rows, x, x_at, x_row, scale, total, of_x_at, of_x_row,
    w, w_at, table, t_at, steps, of_w, of_w_at, shifted, sums, sums_at,
):  # fmt: skip
    """Add the products of 2, 4 or 6 rows to their sums; for arguments see `tile_of`."""
    if rows == 6:
        tile_6(
            x, x_at, x_row, scale, total, of_x_at, of_x_row,
            w, w_at, table, t_at, steps, of_w, of_w_at, shifted, sums, sums_at,
        )  # fmt: skip
    elif rows == 4:
        tile_4(
            x, x_at, x_row, scale, total, of_x_at, of_x_row,
            w, w_at, table, t_at, steps, of_w, of_w_at, shifted, sums, sums_at,
        )  # fmt: skip
    else:
        tile_2(
            x, x_at, x_row, scale, total, of_x_at, of_x_row,
            w, w_at, table, t_at, steps, of_w, of_w_at, shifted, sums, sums_at,
        )  # fmt: skip


@lean_part
def write_group(weights, p, g, n_zeros, out, at):
    """Write scales, negative zeros and negative minimums of a panel's outputs in group g, as `tile_of` reads them."""
    _, scale, zero, minimum, outer_scale, outer_minimum, n_groups, _ = weights
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

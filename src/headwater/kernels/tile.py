"""Tiles of a product: some rows times a panel of weights. A sum is a chain of fused multiply-adds over the inputs.

A panel is 64 outputs: for each input, in order, their 64 weights. A row's sum for an output is one lane of one
accumulator, so it has the same bits in a tile of any size; the size is a matter of registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from headwater import machine
from headwater.kernels.instructions import (
    FLOATS,
    INTS,
    LANES,
    address,
    called,
    filled,
    halves_of,
    intrinsic,
    multiply_added,
    prefetch_line,
)

PANEL = 64  # outputs
VECTORS = PANEL // LANES
BLOCK = 128  # inputs that are widened at a time: 32 KB of float32, a level-1 cache
LINES = 2  # cache lines that a step of a tile asks for: half of a step's weights
HEIGHTS = (1, 2, 4, 6)  # rows of a tile: 3 and 5 rows are two tiles, which saves their compilation
ROWS = max(HEIGHTS)
WIDE = machine.cpu().avx512  # 32 registers of 16 floats; otherwise 16 of 8
INDEX = ir.IntType(64)


class Bfloat(ir.Type):
    """LLVM's bfloat16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


PAIRS = ir.VectorType(Bfloat(), 2 * LANES)


def vectors_at_once(rows: int) -> int:
    """Return how many vectors of a panel a tile of `rows` rows holds sums for, as registers allow."""
    return VECTORS if WIDE or rows == 1 else 2 if rows <= 3 else 1


class Float32:
    """Weights and inputs in float32, one input a step."""

    unit = FLOATS  # of the strides of weights
    of_step, of_vector = VECTORS, 1

    @staticmethod
    def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        return [builder.load(pointer, align=4)]

    @staticmethod
    def inputs(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        return [filled(builder, builder.load(pointer, align=4))]

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, xs: list[ir.Value], weights: list[ir.Value]) -> ir.Value:
        for x, weight in zip(xs, weights, strict=True):
            total = multiply_added(builder, x, weight, total)
        return total


class Widened(Float32):
    """A block of weights that were widened to float32: all inputs of 16 outputs, then those of the next."""

    of_step, of_vector = 1, BLOCK


class Bfloat16(Float32):
    """Weights in bfloat16, inputs in float32; two inputs a step, whose weights are side by side."""

    @staticmethod
    def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        return halves_of(builder, builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4))

    @staticmethod
    def inputs(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        return [filled(builder, builder.load(builder.gep(pointer, [INDEX(i)]), align=4)) for i in range(2)]


class Dot(Float32):
    """Weights and inputs in bfloat16, two inputs a step: AVX512-BF16's dot product, with sums in float32."""

    @staticmethod
    def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        return [builder.load(builder.bitcast(pointer, PAIRS.as_pointer()), align=4)]

    @staticmethod
    def inputs(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        pair = builder.load(builder.bitcast(pointer, ir.IntType(32).as_pointer()), align=2)
        return [builder.bitcast(filled(builder, pair), PAIRS)]

    @staticmethod
    def added(builder: ir.IRBuilder, total: ir.Value, xs: list[ir.Value], weights: list[ir.Value]) -> ir.Value:
        return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, xs[0], weights[0])


class WidenedDot(Dot):
    """A block of weights that were widened to pairs of bfloat16, in the order of `Widened`."""

    of_step, of_vector = 1, BLOCK


def kind_of(x: Any, w: Any) -> Any:
    """Return the kind of product of inputs and weights, which are arrays."""
    if w.dtype == types.int32:
        return Dot if x.dtype == types.int32 else Bfloat16
    return Float32


def fetching_tile_of(rows: int) -> Any:
    """Return the tile that also asks for LINES cache lines of 64 bytes a step, for a later tile.

    One more argument: the elements from a step's weights to the first of these lines.
    """

    @intrinsic
    def tile(_, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh, ahead):
        index = types.intp
        signature = types.none(x, index, index, index, w, index, index, total, index, types.boolean, index)
        return signature, lowered(kind_of(x, w), rows, fetches=True)

    return tile


def tile_of(rows: int, widened: bool = False) -> Any:
    """Return the tile of `rows` rows: it adds the products of `steps` steps to its sums.

    Arguments: inputs (flat), index of the first, their strides between rows and between steps; weights (flat) and the
    index of the first; steps; sums (flat float32, 64 a row), index of the first, whether they begin at zero.
    """

    @intrinsic
    def tile(_, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh):
        wide = WidenedDot if x.dtype == types.int32 else Widened
        index = types.intp
        signature = types.none(x, index, index, index, w, index, index, total, index, types.boolean)
        return signature, lowered(wide if widened else kind_of(x, w), rows)

    return tile


def lowered(kind: Any, rows: int, fetches: bool = False) -> Any:
    """Return what emits a tile of a kind of product.

    Two more arguments are scales of its outputs, and their index; or one, if it fetches (`fetching_tile_of`).
    """

    def lower(context, builder, signature, arguments):
        x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh, *more = arguments
        of_x, of_w, of_total, of_scale = (signature.args[at] for at in (0, 4, 7, -2))
        scale = [] if fetches else more
        later = address(context, builder, of_w, w, builder.add(w_at, *more)) if fetches else None
        first_w = builder.bitcast(address(context, builder, of_w, w, w_at), kind.unit.as_pointer())
        sums = builder.bitcast(address(context, builder, of_total, total, total_at), FLOATS.as_pointer())
        row_starts = [builder.add(x_at, builder.mul(x_row, INDEX(r))) for r in range(rows)]
        first_xs = [address(context, builder, of_x, x, at) for at in row_starts]
        for first in range(0, VECTORS, vectors_at_once(rows)):
            some, scales = range(first, first + vectors_at_once(rows)), None
            if scale:
                of_outputs = builder.bitcast(address(context, builder, of_scale, *scale), FLOATS.as_pointer())
                scales = [builder.load(builder.gep(of_outputs, [INDEX(v)]), align=4) for v in some]
            fetched = later if first == 0 else None
            _multiply(builder, kind, (first_xs, x_step), (first_w, scales, fetched), steps, (sums, fresh), some)
        return context.get_dummy_value()

    return lower


def _multiply(builder, kind, inputs, weights_scales, steps, sums_fresh, vectors) -> None:
    """Emit the loop over steps for some vectors of the panel and all rows."""
    (first_xs, x_step), (first_w, scales, fetched), (sums, fresh) = inputs, weights_scales, sums_fresh
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    totals = {}
    for r in range(len(first_xs)):
        for v in vectors:
            at = builder.gep(sums, [INDEX(r * VECTORS + v)])
            start = builder.select(fresh, zero, builder.load(at, align=4))
            totals[r, v] = at, cgutils.alloca_once_value(builder, start)
    with cgutils.for_range(builder, steps) as loop:
        at_w = builder.mul(loop.index, INDEX(kind.of_step))
        at_vectors = [builder.add(at_w, INDEX(v * kind.of_vector)) for v in vectors]
        weights = [kind.weights(builder, builder.gep(first_w, [at])) for at in at_vectors]
        if scales:
            weights = [kind.scaled(builder, *pair) for pair in zip(weights, scales, strict=True)]
        for line in range(LINES) if fetched else ():
            lines = builder.bitcast(fetched, FLOATS.as_pointer())
            prefetch_line(builder, builder.gep(lines, [builder.add(at_w, INDEX(line))]))
        at_x = builder.mul(loop.index, x_step)
        for r, first_x in enumerate(first_xs):
            xs = kind.inputs(builder, builder.gep(first_x, [at_x]))
            for v, weight in zip(vectors, weights, strict=True):
                total = totals[r, v][1]
                builder.store(kind.added(builder, builder.load(total), xs, weight), total)
    for at, total in totals.values():
        builder.store(builder.load(total), at, align=4)

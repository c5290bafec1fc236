"""Weights in float8 (e4m3), nf4 and fp4 in panels: tiles that unpack them in registers, blocks that many rows share.

The bits of a float8 number, moved to those of a float16, are that number over 256, exactly; scales in panels are 256
times the weight's. NaN has no such bits: readers of checkpoints refuse it. A code of nf4 or fp4 stands for one of 16
numbers, which are looked up. A weight is its number times its scale, rounded to float32, and to bfloat16 after that for
the processor's dot product.

A weight in panels is three values: two codes of an output, for two successive inputs, in an int16 (float8), a uint8
(nf4) or an int8 (fp4); scales of groups of inputs, float32, 64 of a panel for each group; the number of groups. For a
panel, its rows and sums see `tile.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import overload

from headwater.kernels import FP4, NF4
from headwater.kernels.compiling import lean_part
from headwater.kernels.instructions import (
    BYTES,
    FLOATS,
    INTS,
    LANES,
    SHORTS,
    address,
    called,
    int_constant,
    intrinsic,
)
from headwater.kernels.tile import BLOCK, HEIGHTS, PAIRS, PANEL, VECTORS, WIDE, Bfloat16, Dot, lowered
from headwater.kernels.vectors import f32x16, load, store

BIAS = 256  # by which a float8's exponent makes it larger than the float16 of the same bits
FLOAT16_BITS = -0x4080  # bits that a number has: sign, exponent but its highest bit, three of the mantissa


def _by(builder: ir.IRBuilder, operation: str, shorts: ir.Value, constant: int) -> ir.Value:
    return getattr(builder, operation)(shorts, ir.Constant(shorts.type, [constant] * shorts.type.count))


def _floats(builder: ir.IRBuilder, moved: ir.Value) -> ir.Value:
    """Return float32 of numbers over 256, from int16 that have their bits from bit 7 on and their sign in bit 15."""
    n = moved.type.count
    halves = builder.bitcast(_by(builder, "and_", moved, FLOAT16_BITS), ir.VectorType(ir.HalfType(), n))
    return builder.fpext(halves, ir.VectorType(ir.FloatType(), n))


class Float8(Bfloat16):
    """Weights in float8, inputs in float32; two inputs a step."""

    unit = SHORTS

    @staticmethod
    def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        pairs = builder.load(pointer, align=2)
        uppers = _by(builder, "shl", pairs, 8), pairs
        return [_floats(builder, _by(builder, "ashr", upper, 1)) for upper in uppers]

    @staticmethod
    def scaled(builder: ir.IRBuilder, weights: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
        """Return weights with 16 outputs' scales."""
        return [builder.fmul(weight, scale) for weight in weights]


class Float8Dot(Dot):
    """Weights in float8, inputs in bfloat16, two inputs a step: AVX512-BF16's dot product."""

    unit = SHORTS

    @staticmethod
    def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
        codes, shorts = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (8, 16))
        code = builder.sext(builder.bitcast(builder.load(pointer, align=2), codes), shorts)
        return [_floats(builder, _by(builder, "shl", code, 7))]

    @staticmethod
    def scaled(builder: ir.IRBuilder, weights: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
        """Return weights with 16 outputs' scales, rounded to bfloat16."""
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [lane // 2 for lane in range(2 * LANES)])
        whole = builder.fmul(weights[0], builder.shuffle_vector(scale, ir.Constant(FLOATS, ir.Undefined), lanes))
        lower, upper = (
            builder.shuffle_vector(
                whole, ir.Constant(whole.type, ir.Undefined), ir.Constant(INTS, list(range(at, at + LANES)))
            )
            for at in (0, LANES)
        )
        return [called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, upper, lower)]


def _pair(builder: ir.IRBuilder, pointer: ir.Value, table: tuple[float, ...]) -> list[ir.Value]:
    """Return the numbers of 16 outputs for two inputs, float32."""
    codes = builder.zext(builder.load(pointer, align=1), INTS)
    halves = builder.and_(codes, int_constant(15)), builder.lshr(codes, int_constant(4))
    return [_looked_up(builder, half, table) for half in halves]


def _looked_up(builder: ir.IRBuilder, codes: ir.Value, table: tuple[float, ...]) -> ir.Value:
    """Return the numbers that 16 codes stand for."""
    if WIDE:
        return called(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, ir.Constant(FLOATS, list(table)), codes)
    found = ir.Constant(FLOATS, [table[0]] * LANES)
    for code, number in enumerate(table[1:], 1):
        chosen = builder.icmp_signed("==", codes, int_constant(code))
        found = builder.select(chosen, ir.Constant(FLOATS, [number] * LANES), found)
    return found


def _of_table(table: tuple[float, ...]) -> tuple[Any, Any]:
    """Return weights whose codes stand for 16 numbers: with inputs in float32, and in pairs of bfloat16."""

    class Numbers(Float8):
        unit = BYTES
        weights = staticmethod(lambda builder, pointer: _pair(builder, pointer, table))

    class NumbersDot(Float8Dot):
        unit = BYTES

        @staticmethod
        def weights(builder: ir.IRBuilder, pointer: ir.Value) -> list[ir.Value]:
            lanes = [lane + LANES * half for lane in range(LANES) for half in range(2)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), lanes)
            return [builder.shuffle_vector(*_pair(builder, pointer, table), mask)]

    return Numbers, NumbersDot


# of weights in panels, by the type of their codes: with inputs in float32, and in pairs of bfloat16
KINDS: dict[Any, tuple[Any, Any]] = {
    types.int16: (Float8, Float8Dot),
    types.uint8: _of_table(NF4),
    types.int8: _of_table(FP4),
}


def tile_of(rows: int) -> Any:
    """Return the tile of `rows` rows: `kernels/tile.py`'s, for weights of one group, with the outputs' scales."""

    @intrinsic
    def tile(_, x, x_at, x_row, x_step, w, w_at, steps, total, total_at, fresh, scale, scale_at):
        index = types.intp
        kinds = (x, index, index, index, w, index, index, total, index, types.boolean, scale, index)
        return types.none(*kinds), lowered(KINDS[w.dtype][x.dtype == types.int32], rows)

    return tile


tile_1, tile_2, tile_4, tile_6 = map(tile_of, HEIGHTS)


def _unpacking(dot: bool, of: Any, result: Any) -> Any:
    """Return the operation that unpacks the weights of 16 outputs for two inputs, given their scales."""

    @intrinsic
    def unpacked(_, array, index, scale):
        kind = KINDS[array.dtype][dot]

        def lower(context, builder, signature, arguments):
            value, at, scales = arguments
            pointer = builder.bitcast(address(context, builder, array, value, at), kind.unit.as_pointer())
            return result(context, builder, signature, kind.scaled(builder, kind.weights(builder, pointer), scales))

        return of(array, types.intp, f32x16), lower

    return unpacked


two_inputs = _unpacking(
    False,
    types.UniTuple(f32x16, 2),
    lambda context, builder, signature, weights: context.make_tuple(builder, signature.return_type, weights),
)
pairs_of_bfloat16 = _unpacking(
    True, f32x16, lambda context, builder, signature, weights: builder.bitcast(weights[0], FLOATS)
)


def elements(x, inputs):
    """Return how many elements of rows hold `n` inputs: half as many if they are pairs of bfloat16 (int32)."""


@overload(elements)
def _elements_by_format(x, inputs):
    return (lambda x, inputs: inputs // 2) if x.dtype == types.int32 else (lambda x, inputs: inputs)


@lean_part
def add_float8(x, x_at, x_row, weights, p, n_inputs, rows, total, total_at):
    """Write the sums of 1 to 6 rows for panel p, a group after the other."""
    codes, scale, n_groups = weights
    steps, x_step = n_inputs // n_groups // 2, elements(x, 2)
    for g in range(n_groups):
        of_scale, first, fresh = (p * n_groups + g) * PANEL, x_at + g * steps * x_step, g == 0
        w_at = of_scale * steps
        if rows == 6:
            tile_6(x, first, x_row, x_step, codes, w_at, steps, total, total_at, fresh, scale, of_scale)
            continue
        r = rows & 4
        if r:
            tile_4(x, first, x_row, x_step, codes, w_at, steps, total, total_at, fresh, scale, of_scale)
        if rows & 2:
            at, sums = first + r * x_row, total_at + r * PANEL
            tile_2(x, at, x_row, x_step, codes, w_at, steps, total, sums, fresh, scale, of_scale)
            r += 2
        if rows & 1:
            at, sums = first + r * x_row, total_at + r * PANEL
            tile_1(x, at, x_row, x_step, codes, w_at, steps, total, sums, fresh, scale, of_scale)


@lean_part
def widen_float8(weights, p, n_inputs, first, last, out, at):
    """Write the weights of inputs [first, last) of panel p, both even, to a block of float32."""
    codes, scale, n_groups = weights
    group = n_inputs // n_groups
    for k in range(first, last, 2):
        for v in range(VECTORS):
            of_outputs = load(scale, (p * n_groups + k // group) * PANEL + v * LANES)
            lower, upper = two_inputs(codes, (p * n_inputs + k) // 2 * PANEL + v * LANES, of_outputs)
            to = at + (v * BLOCK + k - first) * LANES
            store(out, to, lower)
            store(out, to + LANES, upper)


@lean_part
def round_float8(weights, p, n_inputs, first, last, out, at):
    """Do the same with a block of pairs of bfloat16, in memory of float32."""
    codes, scale, n_groups = weights
    group = n_inputs // n_groups
    for k in range(first, last, 2):
        for v in range(VECTORS):
            of_outputs = load(scale, (p * n_groups + k // group) * PANEL + v * LANES)
            pairs = pairs_of_bfloat16(codes, (p * n_inputs + k) // 2 * PANEL + v * LANES, of_outputs)
            store(out, at + (v * BLOCK + (k - first) // 2) * LANES, pairs)

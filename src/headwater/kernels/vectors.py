"""Vectors of 16 float32 for kernels: what numba needs to know of them, and the operations on them.

A kernel that is written with these operations fixes the order of every sum in its source: LLVM translates them one by
one and may not reorder them. A processor without registers of 512 bits takes two instructions of 256 for each, so all
x86 processors with FMA, and ARM's, give the same bits.

`load` and its kin take an array of one dimension and the index of the first of 16 elements; bounds are not checked.
Arrays of bfloat16 are int16 for numba, see `arrays.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import lower_builtin, models, register_model, type_callable

from headwater.kernels.compiling import part
from headwater.kernels.instructions import (
    BYTES,
    FLOATS,
    INTS,
    SHORTS,
    address,
    as_floats,
    called,
    element_of,
    filled,
    halves_of,
    int_constant,
    intrinsic,
    loaded,
    multiply_added,
    prefetch_line,
    rounded,
    widened,
)
from headwater.kernels.instructions import (
    LANES as LANES,
)

LINE = 64  # bytes of a cache line


class Vector(types.Type):
    """Numba's type of a vector."""


f32x16 = Vector(name="f32x16")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is an LLVM vector, held in registers."""

    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, FLOATS)


@intrinsic
def load(_, array, index):
    """Return 16 elements from `index` on, of float32, bfloat16 (int16), float16 (uint16) or uint8."""

    def lower(context, builder, _signature, arguments):
        pointer = address(context, builder, array, *arguments)
        return as_floats(builder, array, loaded(builder, pointer, ir.VectorType(element_of(array), LANES)))

    return f32x16(array, types.intp), lower


@intrinsic
def _load_first(_, array, index, n):
    """Return the first `n` of 16 elements, at least one; the other lanes are zeros."""

    def lower(context, builder, _signature, arguments):
        value, at, n = arguments
        whole = ir.VectorType(element_of(array), LANES)
        elements = ir.Constant(whole, None)
        for lane in range(LANES):
            number, there = ir.Constant(at.type, lane), builder.icmp_signed("<", ir.Constant(at.type, lane), n)
            pointer = address(
                context, builder, array, value, builder.add(at, builder.select(there, number, ir.Constant(at.type, 0)))
            )
            one = builder.select(there, builder.load(pointer), ir.Constant(whole.element, None))
            elements = builder.insert_element(elements, one, ir.Constant(ir.IntType(32), lane))
        return as_floats(builder, array, elements)

    return f32x16(array, types.intp, types.intp), lower


@intrinsic
def lower_half(_, array, index):
    """Return the lower bfloat16 of 16 pairs (int32) from `index` on, as float32."""

    def lower(context, builder, _signature, arguments):
        return halves_of(builder, loaded(builder, address(context, builder, array, *arguments), INTS))[0]

    return f32x16(array, types.intp), lower


@intrinsic
def upper_half(_, array, index):
    """Return the upper bfloat16 of 16 pairs (int32) from `index` on, as float32."""

    def lower(context, builder, _signature, arguments):
        return halves_of(builder, loaded(builder, address(context, builder, array, *arguments), INTS))[1]

    return f32x16(array, types.intp), lower


def _elements(builder: ir.IRBuilder, array: Any, floats: ir.Value) -> ir.Value:
    """Return 16 float32 as elements of an array: float32, bfloat16 (rounded), or int8 (integers within ±127)."""
    if array.dtype == types.int8:
        return builder.trunc(builder.fptosi(floats, INTS), BYTES)
    return floats if array.dtype == types.float32 else rounded(builder, floats)


@intrinsic
def store(_, array, index, vector):
    """Write 16 elements of float32, bfloat16 (rounded) or int8 (integers within ±127) from `index` on."""

    def lower(context, builder, _signature, arguments):
        value, at, floats = arguments
        written = _elements(builder, array, floats)
        pointer = address(context, builder, array, value, at)
        builder.store(written, builder.bitcast(pointer, written.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x16), lower


@intrinsic
def _store_first(_, array, index, vector, n):
    """Write the first `n` of 16 elements."""

    def lower(context, builder, _signature, arguments):
        value, at, floats, n = arguments
        written = _elements(builder, array, floats)
        for lane in range(LANES):
            number = ir.Constant(at.type, lane)
            with builder.if_then(builder.icmp_signed("<", number, n)):
                one = builder.extract_element(written, ir.Constant(ir.IntType(32), lane))
                builder.store(one, address(context, builder, array, value, builder.add(at, number)))
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x16, types.intp), lower


@intrinsic
def prefetch(_, array, index):
    """Ask for the cache line of an element, which need not exist."""

    def lower(context, builder, _signature, arguments):
        prefetch_line(builder, address(context, builder, array, *arguments))
        return context.get_dummy_value()

    return types.none(array, types.intp), lower


@intrinsic
def copy_line(_, out, to, array, at):
    """Copy LINE bytes from one array of bytes to another, from `at` on to `to` on."""

    def lower(context, builder, signature, arguments):
        of_out, _, of_array, _ = signature.args
        value, to, source, at = arguments
        line = loaded(builder, address(context, builder, of_array, source, at), ir.VectorType(ir.IntType(8), LINE))
        pointer = address(context, builder, of_out, value, to)
        builder.store(line, builder.bitcast(pointer, line.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(out, types.intp, array, types.intp), lower


@intrinsic
def fill(_, scalar):
    """Return a vector with a float32 in each lane."""

    def lower(_context, builder, _signature, arguments):
        return filled(builder, arguments[0])

    return f32x16(types.float32), lower


@intrinsic
def spread(_, array, index):
    """Return a vector with the element of float32 or bfloat16 at `index` in each lane."""
    is_float = array.dtype == types.float32

    def lower(context, builder, _signature, arguments):
        element = filled(builder, builder.load(address(context, builder, array, *arguments)))
        return element if is_float else widened(builder, element)

    return f32x16(array, types.intp), lower


@intrinsic
def load_triples(_, array, index):
    """Return the first, second and third elements of 16 triples of float32 or bfloat16 from `index` on."""
    is_float = array.dtype == types.float32

    def lower(context, builder, signature, arguments):
        pointer = address(context, builder, array, *arguments)
        of = ir.VectorType((FLOATS if is_float else SHORTS).element, 3 * LANES)
        triples = loaded(builder, pointer, of)
        parts = []
        for at in range(3):
            lanes = ir.Constant(INTS, list(range(at, 3 * LANES, 3)))
            chosen = builder.shuffle_vector(triples, ir.Constant(of, ir.Undefined), lanes)
            parts.append(chosen if is_float else widened(builder, chosen))
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(f32x16, 3)(array, types.intp), lower


@intrinsic
def store_triples(_, array, index, first, second, third):
    """Write 16 triples of float32 or bfloat16 (rounded) from `index` on."""
    is_float = array.dtype == types.float32

    def lower(context, builder, _signature, arguments):
        value, at, *floats = arguments
        a, b, c = (part if is_float else rounded(builder, part) for part in floats)
        whole = ir.VectorType(ir.IntType(32), 2 * LANES)
        ab = builder.shuffle_vector(a, b, ir.Constant(whole, list(range(2 * LANES))))
        cc = builder.shuffle_vector(c, c, ir.Constant(whole, list(range(2 * LANES))))
        lanes = [lane + LANES * part for lane in range(LANES) for part in range(3)]
        triples = builder.shuffle_vector(ab, cc, ir.Constant(ir.VectorType(ir.IntType(32), 3 * LANES), lanes))
        pointer = address(context, builder, array, value, at)
        builder.store(triples, builder.bitcast(pointer, triples.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(array, types.intp, f32x16, f32x16, f32x16), lower


@intrinsic
def fma(_, a, b, c):
    """Return a · b + c, rounded once."""

    def lower(_context, builder, _signature, arguments):
        return multiply_added(builder, *arguments)

    return f32x16(f32x16, f32x16, f32x16), lower


def _by_operator(symbol: Callable[..., Any], name: str) -> None:
    """Make an operator of two vectors the instruction that LLVM's builder calls by this name, without a function."""

    @type_callable(symbol)
    def type_of(_):
        return lambda a, b: f32x16 if isinstance(a, Vector) and isinstance(b, Vector) else None

    @lower_builtin(symbol, Vector, Vector)
    def lower(_context, builder, _signature, arguments):
        return getattr(builder, name)(*arguments)


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _by_operator(_symbol, _name)


@intrinsic
def maximum(_, a, b):
    """Return the larger of each lane; no input is NaN."""

    def lower(_context, builder, _signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return f32x16(f32x16, f32x16), lower


@intrinsic
def maximum_or_nan(_, a, b):
    """Return the larger of each lane, or NaN if one of them is NaN."""

    def lower(_context, builder, _signature, arguments):
        return called(builder, "llvm.maximum.v16f32", FLOATS, *arguments)

    return f32x16(f32x16, f32x16), lower


def _over_lanes(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    """Return the operation that combines all lanes: 0 with 8, 1 with 9, …; then of eight 0 with 4, …"""

    @intrinsic
    def operation(_, vector):
        def lower(_context, builder, _signature, arguments):
            value, n = arguments[0], LANES
            while n > 1:
                n //= 2
                parts = (ir.Constant(ir.VectorType(ir.IntType(32), n), list(range(at, at + n))) for at in (0, n))
                halves = [builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), at) for at in parts]
                value = combine(builder, *halves)
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return types.float32(f32x16), lower

    return operation


sum_lanes = _over_lanes(lambda builder, a, b: builder.fadd(a, b))
max_lanes = _over_lanes(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def square_root(_, vector):
    """Return the square root of each lane."""

    def lower(_context, builder, _signature, arguments):
        return called(builder, "llvm.sqrt.v16f32", FLOATS, *arguments)

    return f32x16(f32x16), lower


@intrinsic
def nearest(_, vector):
    """Return the nearest integer of each lane, as float32."""

    def lower(_context, builder, _signature, arguments):
        return called(builder, "llvm.rint.v16f32", FLOATS, *arguments)

    return f32x16(f32x16), lower


@intrinsic
def power_of_two(_, vector):
    """Return 2^n for integers n in [-126, 127], given as float32."""

    def lower(_context, builder, _signature, arguments):
        exponent = builder.add(builder.fptosi(arguments[0], INTS), int_constant(127))
        return builder.bitcast(builder.shl(exponent, int_constant(23)), FLOATS)

    return f32x16(f32x16), lower


@part
def load_some(array, index, n):
    """Return elements from `index` on, the first `n` of 16; the other lanes are zeros."""
    if n >= LANES:
        return load(array, index)
    return _load_first(array, index, n)


@part
def store_some(array, index, vector, n):
    """Write the first `n` of 16 elements from `index` on."""
    if n >= LANES:
        store(array, index, vector)
    else:
        _store_first(array, index, vector, n)

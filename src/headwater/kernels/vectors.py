"""Vectors of 16 float32 for kernels: what numba needs to know of them, and the operations on them.

A kernel that is written with these operations fixes the order of every sum in its source: LLVM translates them one by
one and may not reorder them. A processor without registers of 512 bits takes two instructions of 256 for each, so all
x86 processors with FMA, and ARM's, give the same bits.

`load` and its kin take an array of one dimension and the index of the first of 16 elements; bounds are not checked.
Arrays of bfloat16 are int16 for numba, see `arrays.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.extending import intrinsic as untyped_intrinsic
from numba.core.extending import models, overload, register_model

intrinsic: Any = untyped_intrinsic  # kernels call what it decorates without its first parameter

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)
LOG2_E = math.log2(math.e)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n · high is exact for |n| < 2^9
EXP_RANGE = 87.3  # e^±87.3 are normal numbers
# e^r = 1 + r + r² (…) for |r| ≤ ln(2) / 2: the Taylor series, its last coefficients adjusted for the interval
EXP_SERIES = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                            1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
ATANH_SERIES = tuple(np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))


class Vector(types.Type):
    """Numba's type of a vector."""


f32x16 = Vector(name="f32x16")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is an LLVM vector, held in registers."""

    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, FLOATS)


# -- LLVM's instructions -------------------------------------------------------


def constant(value: float) -> ir.Constant:
    """Return a vector with `value` in each lane."""
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def int_constant(value: int) -> ir.Constant:
    """Return integers with `value` in each lane."""
    return ir.Constant(INTS, [value] * LANES)


def filled(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Copy a scalar to each lane."""
    of = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(of, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(of, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def called(builder: ir.IRBuilder, name: str, of: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its whole name."""
    kind = ir.FunctionType(of, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def multiply_added(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a · b + c, rounded once."""
    return called(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Return the float32 of 16 bfloat16, given as int16."""
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), int_constant(16)), FLOATS)


def halves_of(builder: ir.IRBuilder, pairs: ir.Value) -> list[ir.Value]:
    """Return the float32 of 16 pairs of bfloat16: the lower ones, and the upper ones."""
    halves = builder.shl(pairs, int_constant(16)), builder.and_(pairs, int_constant(-(1 << 16)))
    return [builder.bitcast(half, FLOATS) for half in halves]


def _from_float16(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _from_bytes(builder: ir.IRBuilder, some: ir.Value) -> ir.Value:
    return builder.sitofp(builder.zext(some, INTS), FLOATS)


def rounded(builder: ir.IRBuilder, floats: ir.Value) -> ir.Value:
    """Return the nearest bfloat16, ties to even, as int16; the inputs are no NaN."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, int_constant(16)), int_constant(1))
    up = builder.add(bits, builder.add(odd, int_constant(0x7FFF)))
    return builder.trunc(builder.lshr(up, int_constant(16)), SHORTS)


def address(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, index: ir.Value) -> ir.Value:
    """Return the address of an element of an array; negative indices do not count from the end."""
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])


def loaded(builder: ir.IRBuilder, pointer: ir.Value, of: ir.VectorType) -> ir.Value:
    """Load 16 elements that begin anywhere."""
    return builder.load(builder.bitcast(pointer, of.as_pointer()), align=1)


# -- operations of kernels -----------------------------------------------------


def element_of(array: Any) -> ir.Type:
    """Return LLVM's type of an array's elements."""
    return ir.FloatType() if array.dtype == types.float32 else ir.IntType(array.dtype.bitwidth)


def as_floats(builder: ir.IRBuilder, array: Any, elements: ir.Value) -> ir.Value:
    """Return 16 elements of an array as float32."""
    of_halves = {types.int16: widened, types.uint16: _from_float16}.get(array.dtype)
    if array.dtype == types.uint8:
        return _from_bytes(builder, elements)
    return of_halves(builder, elements) if of_halves else elements


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
        pointer = builder.bitcast(address(context, builder, array, *arguments), ir.IntType(8).as_pointer())
        into_second_level = [ir.Constant(ir.IntType(32), n) for n in (0, 2, 1)]  # read, locality, data
        kind = ir.FunctionType(ir.VoidType(), [of.type for of in (pointer, *into_second_level)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, *into_second_level])
        return context.get_dummy_value()

    return types.none(array, types.intp), lower


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


def _of_two(name: str) -> Any:
    """Return the operation of two vectors that LLVM's builder calls by this name."""

    @intrinsic
    def operation(_, a, b):
        def lower(_context, builder, _signature, arguments):
            return getattr(builder, name)(*arguments)

        return f32x16(f32x16, f32x16), lower

    return operation


def _by_operator(symbol: Callable[..., Any], operation: Any) -> None:
    @overload(symbol)
    def of_vectors(a, b):
        if isinstance(a, Vector) and isinstance(b, Vector):
            return lambda a, b: operation(a, b)
        return None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _by_operator(_symbol, _of_two(_name))


@intrinsic
def maximum(_, a, b):
    """Return the larger of each lane; the inputs are no NaN."""

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
def _power_of_two(_, vector):
    """Return 2^n for integers n in [-126, 127], given as float32."""

    def lower(_context, builder, _signature, arguments):
        exponent = builder.add(builder.fptosi(arguments[0], INTS), int_constant(127))
        return builder.bitcast(builder.shl(exponent, int_constant(23)), FLOATS)

    return f32x16(f32x16), lower


@njit
def _polynomial(x, coefficients):
    """Return the polynomial of x with these coefficients, that of the highest power first."""
    total = fill(coefficients[0])
    for i in range(1, len(coefficients)):
        total = fma(total, x, fill(coefficients[i]))
    return total


@njit
def exp(x):
    """Return e^x, x within ±87.3 (beyond, the value at that end): e^x = 2^n e^r, with |r| ≤ ln(2) / 2."""
    x = maximum(fill(np.float32(-EXP_RANGE)), x)
    x = fill(np.float32(0)) - maximum(fill(np.float32(-EXP_RANGE)), fill(np.float32(0)) - x)
    n = nearest(x * fill(np.float32(LOG2_E)))
    r = fma(n, fill(np.float32(-LN2_HIGH)), x)
    r = fma(n, fill(np.float32(-LN2_LOW)), r)
    return fma(_polynomial(r, EXP_SERIES), r * r, r + fill(np.float32(1))) * _power_of_two(n)


@njit
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    one = fill(np.float32(1))
    return one / (one + exp(fill(np.float32(0)) - x))


@njit
def silu(x):
    """Return x · sigmoid(x)."""
    return x / (fill(np.float32(1)) + exp(fill(np.float32(0)) - x))


@njit
def softplus(x):
    """Return log(1 + e^x) = max(x, 0) + log1p(e^-|x|), where log1p(u) = 2 atanh(u / (2 + u))."""
    zero = fill(np.float32(0))
    u = exp(zero - maximum(x, zero - x))
    s = u / (fill(np.float32(2)) + u)
    return maximum(x, zero) + (s + s) * _polynomial(s * s, ATANH_SERIES)


@njit
def load_some(array, index, n):
    """Return elements from `index` on, the first `n` of 16; the other lanes are zeros."""
    if n >= LANES:
        return load(array, index)
    return _load_first(array, index, n)


@njit
def store_some(array, index, vector, n):
    """Write the first `n` of 16 elements from `index` on."""
    if n >= LANES:
        store(array, index, vector)
    else:
        _store_first(array, index, vector, n)

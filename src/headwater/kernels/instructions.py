"""LLVM's instructions on 16 lanes, which the operations of `vectors.py` and the tiles of products consist of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic as untyped_intrinsic

intrinsic: Any = untyped_intrinsic  # kernels call what it decorates without its first parameter

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)


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


def prefetch_line(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Ask for the cache line of an address, which need not be one of the process."""
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    into_second_level = [ir.Constant(ir.IntType(32), n) for n in (0, 2, 1)]  # read, locality, data
    called(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, *into_second_level)


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
    """Return the nearest bfloat16, ties to even, as int16; no input is NaN."""
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


def element_of(array: Any) -> ir.Type:
    """Return LLVM's type of an array's elements."""
    return ir.FloatType() if array.dtype == types.float32 else ir.IntType(array.dtype.bitwidth)


def as_floats(builder: ir.IRBuilder, array: Any, elements: ir.Value) -> ir.Value:
    """Return 16 elements of an array as float32."""
    of_halves = {types.int16: widened, types.uint16: _from_float16}.get(array.dtype)
    if array.dtype == types.uint8:
        return _from_bytes(builder, elements)
    return of_halves(builder, elements) if of_halves else elements

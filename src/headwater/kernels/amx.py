"""Products by AMX: tiles of 16 rows times 16 outputs; of bfloat16 with sums in float32, of bytes with sums in integers.

A sum of bfloat16 is a chain over runs of 32 inputs in their order; within a run the processor's order is fixed. The
sums of a tile do not depend on each other, so a row has the same bits in a tile of any height, and whether sums stay in
registers or are stored between runs. Denormals are zeros.

Weights lie in panels of 64 outputs, two inputs of an output side by side (`tile.py`), which is the layout that AMX
takes: a tile of weights has the 16 pairs of a run as its rows, 256 bytes apart.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from headwater import machine
from headwater.kernels.compiling import lean_part
from headwater.kernels.instructions import address, called, intrinsic
from headwater.kernels.tile import BLOCK, INDEX, PANEL

RUN = 32  # inputs of a run
PAIRS = RUN // 2
HEIGHT = 16  # rows of a tile
LINE = 64  # bytes of a tile's row: 16 float32, or 16 pairs
TILES = 8  # registers
SUMS, INPUTS, WEIGHTS = range(4), (4, 5), (6, 7)  # numbers of registers
PANEL_LINE = PANEL * 4  # bytes of a panel's pairs, or sums, of all outputs
# bytes by which weights are fetched early: one row and 1,024 x 3,584 took 687 µs without, 600 with it (one thread)
AHEAD = 4096
BYTE, POINTER, NONE = ir.IntType(8), ir.IntType(8).as_pointer(), ir.VoidType()


def usable() -> bool:
    """Return whether kernels may use AMX for bfloat16."""
    return machine.compiles("amx_tile") and machine.compiles("amx_bf16")


def usable_for_bytes() -> bool:
    """Return whether kernels may use AMX for integers of 8 bits."""
    return machine.compiles("amx_tile") and machine.compiles("amx_int8")


def _tile(builder: ir.IRBuilder, name: str, *arguments: ir.Value | int) -> None:
    """Emit an instruction; integers are numbers of registers."""
    called(builder, f"llvm.x86.{name}", NONE, *(BYTE(a) if isinstance(a, int) else a for a in arguments))


def _byte_address(context, builder, of, array, index):
    return builder.bitcast(address(context, builder, of, array, index), POINTER)


def _configure(builder: ir.IRBuilder, rows: list[ir.Value], widths: list[ir.Value]) -> None:
    """Emit the configuration of registers: the rows of each, and the bytes of a row."""
    settings = cgutils.alloca_once(builder, ir.ArrayType(BYTE, LINE))
    builder.store(ir.Constant(settings.type.pointee, None), settings)
    first = builder.bitcast(settings, POINTER)
    builder.store(BYTE(1), first)  # the palette
    for register in range(TILES):
        builder.store(widths[register], builder.gep(first, [INDEX(16 + 2 * register)]))
        builder.store(rows[register], builder.gep(first, [INDEX(48 + register)]))
    _tile(builder, "ldtilecfg", first)


@intrinsic
def configure(_, upper, lower):
    """Set the rows of registers: `upper` of the first inputs and their sums, `lower` of the second ones."""

    def lowered(context, builder, _signature, arguments):
        upper, lower = (builder.trunc(rows, BYTE) for rows in arguments)
        rows = [upper, upper, lower, lower, upper, lower, BYTE(HEIGHT), BYTE(HEIGHT)]
        _configure(builder, rows, [BYTE(LINE)] * TILES)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp), lowered


@intrinsic
def configure_bytes(_, run):
    """Set registers for 16 rows and runs of `run` inputs of 8 bits, a multiple of 4 up to 64."""

    def lowered(context, builder, _signature, arguments):
        run = builder.trunc(arguments[0], BYTE)
        fours, whole = builder.udiv(run, BYTE(4)), BYTE(HEIGHT)
        _configure(
            builder,
            [*[whole] * len(SUMS), whole, whole, fours, fours],
            [*[BYTE(LINE)] * len(SUMS), run, run, BYTE(LINE), BYTE(LINE)],
        )
        return context.get_dummy_value()

    return types.none(types.intp), lowered


@intrinsic
def write_dots(_, x, x_at, x_row, w, w_at, run, runs, total, total_at):
    """Write the sums of products of 16 rows of int8 with a panel of uint8, int32 [16, 64] stored as float32.

    Arguments: inputs (int8), index of the first, their stride between rows; weights, four of an output side by side
    (32 bits), index of the first; inputs of a run, as configured; runs; sums, index of the first.
    """

    def lowered(context, builder, signature, arguments):
        x, x_at, x_row, w, w_at, run, runs, total, total_at = arguments
        first_x = _byte_address(context, builder, signature.args[0], x, x_at)
        first_w = _byte_address(context, builder, signature.args[3], w, w_at)
        to = _byte_address(context, builder, signature.args[7], total, total_at)
        for sums in SUMS:
            _tile(builder, "tilezero", sums)
        of_run = builder.mul(run, INDEX(PANEL))  # bytes of the weights: a quarter of the inputs, in lines of 256
        with cgutils.for_range(builder, runs) as loop:
            at_x = builder.gep(first_x, [builder.mul(loop.index, run)])
            at_w = builder.gep(first_w, [builder.mul(loop.index, of_run)])
            _tile(builder, "tileloadd64", INPUTS[0], at_x, x_row)
            for sums in SUMS:
                weights = WEIGHTS[sums % 2]
                _tile(builder, "tileloadd64", weights, builder.gep(at_w, [INDEX(sums * LINE)]), INDEX(PANEL_LINE))
                _tile(builder, "tdpbsud", sums, INPUTS[0], weights)
        for sums in SUMS:
            _tile(builder, "tilestored64", sums, builder.gep(to, [INDEX(sums * LINE)]), INDEX(PANEL_LINE))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, w, index, index, index, total, index), lowered


@intrinsic
def release(_):
    """Give the registers back, so that they need not be saved when the thread is interrupted."""

    def lowered(context, builder, _signature, _arguments):
        _tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), lowered


def _product(rows: int, vectors: int, fetch: bool):
    """Return what multiplies tiles of `rows` times `vectors` tiles of weights, four products of a run.

    Arguments: inputs in pairs (int32), index of the first, their stride between rows; weights (int32), index of the
    first; runs; sums (float32, 64 a row), index of the first, whether they begin at zero.
    """

    @intrinsic
    def product(_, x, x_at, x_row, w, w_at, runs, total, total_at, fresh):
        def lowered(context, builder, signature, arguments):
            x, x_at, x_row, w, w_at, runs, total, total_at, fresh = arguments
            of_x, _, _, of_w, _, _, of_total, *_ = signature.args
            x_bytes = builder.mul(x_row, INDEX(4))
            first_x = _byte_address(context, builder, of_x, x, x_at)
            first_w = _byte_address(context, builder, of_w, w, w_at)
            first_total = _byte_address(context, builder, of_total, total, total_at)
            xs = [builder.gep(first_x, [builder.mul(x_bytes, INDEX(i * HEIGHT))]) for i in range(rows)]
            places = [(i, j) for i in range(rows) for j in range(vectors)]
            totals = [builder.gep(first_total, [INDEX(i * HEIGHT * PANEL_LINE + j * LINE)]) for i, j in places]
            with builder.if_else(fresh) as (begin, go_on):
                with begin:
                    for sums in SUMS:
                        _tile(builder, "tilezero", sums)
                with go_on:
                    for sums, at in zip(SUMS, totals, strict=True):
                        _tile(builder, "tileloadd64", sums, at, INDEX(PANEL_LINE))
            with cgutils.for_range(builder, runs) as loop:
                of_run = builder.gep(first_w, [builder.mul(loop.index, INDEX(PAIRS * PANEL_LINE))])
                if fetch:
                    for line in range(0, PAIRS * PANEL_LINE, LINE):
                        _fetch(builder, builder.gep(of_run, [INDEX(AHEAD + line)]))
                for i, first in enumerate(xs):
                    at = builder.gep(first, [builder.mul(loop.index, INDEX(LINE))])
                    _tile(builder, "tileloadd64", INPUTS[i], at, x_bytes)
                    for j in range(vectors):
                        weights = WEIGHTS[j % 2]
                        if i == 0:
                            at = builder.gep(of_run, [INDEX(j * LINE)])
                            _tile(builder, "tileloadd64", weights, at, INDEX(PANEL_LINE))
                        _tile(builder, "tdpbf16ps", i * vectors + j, INPUTS[i], weights)
            for sums, at in zip(SUMS, totals, strict=True):
                _tile(builder, "tilestored64", sums, at, INDEX(PANEL_LINE))
            return context.get_dummy_value()

        index = types.intp
        return types.none(x, index, index, w, index, index, total, index, types.boolean), lowered

    return product


def _fetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Emit a prefetch for reading, into all caches."""
    number = ir.IntType(32)
    called(builder, "llvm.prefetch.p0i8", NONE, pointer, number(0), number(3), number(1))


_few = _product(1, 4, fetch=True)  # at most 16 rows, a panel's 64 outputs
_many = _product(2, 2, fetch=False)  # 17 to 32 rows, 32 outputs


@lean_part
def write_sums(x, x_at, x_row, w, w_at, pairs, rows, total, total_at):
    """Write the products of rows with a panel: 64 sums a row. `pairs` of inputs are whole runs."""
    whole = rows - rows % (2 * HEIGHT)
    if whole:
        configure(HEIGHT, HEIGHT)
        for first in range(0, pairs, BLOCK):
            runs, w_first, fresh = min(BLOCK, pairs - first) // PAIRS, w_at + first * PANEL, first == 0
            for r in range(0, whole, 2 * HEIGHT):
                x_first, sums = x_at + r * x_row + first, total_at + r * PANEL
                _many(x, x_first, x_row, w, w_first, runs, total, sums, fresh)
                _many(x, x_first, x_row, w, w_first + PANEL // 2, runs, total, sums + PANEL // 2, fresh)
    rest, x_at, total_at = rows - whole, x_at + whole * x_row, total_at + whole * PANEL
    if rest > HEIGHT:
        configure(HEIGHT, rest - HEIGHT)
        _many(x, x_at, x_row, w, w_at, pairs // PAIRS, total, total_at, True)
        _many(x, x_at, x_row, w, w_at + PANEL // 2, pairs // PAIRS, total, total_at + PANEL // 2, True)
    elif rest:
        configure(rest, rest)
        _few(x, x_at, x_row, w, w_at, pairs // PAIRS, total, total_at, True)
    release()

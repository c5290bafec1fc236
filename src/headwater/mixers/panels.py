"""Weights in panels of 64 outputs, held once and as stored, and the products with them that kernels compute.

A sum is float32 and one chain over the inputs in their order (`kernels/product.py`), with integers over runs of inputs
(`kernels/integers.py`). So a row's bits depend neither on other rows nor on threads, and weights in bfloat16 give the
bits of their float32 copies.

R rows, K inputs, N outputs, P panels, X groups of inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater import machine
from headwater.kernels import FP4, NF4, amx
from headwater.kernels.compiling import threads_in_use
from headwater.kernels.float8 import BIAS
from headwater.kernels.integers import multiply_integers
from headwater.kernels.product import (
    LINEAR,
    SIGMOID,
    SILU,
    multiply,
    multiply_by_amx,
    multiply_float8,
    widen_and_multiply,
)
from headwater.kernels.recording import empty, flat
from headwater.kernels.residual import copy_panel_rows_into, values_of_codes_into, widen_panel_rows_into
from headwater.kernels.tile import BLOCK, PANEL, ROWS, WIDE
from headwater.kernels.vectors import LANES
from headwater.mixers.quantised import MAX_BITS, TABLE_BITS, Quantised
from headwater.mixers.weight_memory import Slabs, kept

# what the kernel for integers takes, in its order
ARRAYS = ("code_NK", "scale_NX", "zero_NX", "minimum_NX", "outer_scale_NS", "outer_minimum_NS")
OUTER = ("outer_scale_NS", "outer_minimum_NS")
SCALES = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float16}  # of Q6_K and NVFP4, as kernels read them
FLOAT_TABLES: dict[Any, torch.dtype] = {NF4: torch.uint8, FP4: torch.int8}  # and what tells kernels which it is
ACTIVATIONS = {"none": LINEAR, "swish": SILU, "sigmoid": SIGMOID}
# how rows of pairs of bfloat16 are looked up, by the dtype of the result
LOOKUPS = {
    torch.float32: (torch.int32, widen_panel_rows_into),
    torch.bfloat16: (torch.int16, copy_panel_rows_into),
}
_of_thread = threading.local()
_slabs = Slabs()


@dataclass(frozen=True)
class Held:
    """A weight as kernels read it: arrays, and the kernels for few rows and for more."""

    arrays: tuple[Any, ...]
    rows: Callable[[Tensor], Tensor]  # of the weight, by their numbers
    few: Callable[..., None] = widen_and_multiply
    many: Callable[..., None] = widen_and_multiply
    few_rows: int = ROWS  # rows, at most, that `few` multiplies
    pairs: bool = False  # two inputs of an output are side by side
    dot: bool = False  # multiplies bfloat16 inputs
    order_K: Tensor | None = None  # the input of each code of a row, if not their own order

    def ordered(self, x_RK: Tensor) -> Tensor:
        """Return the inputs of rows in the order of codes."""
        if self.order_K is None:
            return x_RK
        return torch.index_select(x_RK, 1, self.order_K, out=empty(len(x_RK), len(self.order_K), dtype=x_RK.dtype))


class PanelProduct:
    """The product y = then(x Wᵀ + b) · factor with a weight in panels, for inputs and results in `dtype`."""

    def __init__(self, weight_NK: Tensor | Quantised, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        self.n_out, self.n_in = weight_NK.shape
        self.dtype = dtype
        self.held = held(weight_NK, dtype)
        self._width = _width(self.n_out)
        padded = torch.zeros(0) if bias_N is None else F.pad(bias_N.float(), (0, -self.n_out % PANEL))
        self._bias = flat(padded)
        self._none = flat(torch.empty(0, dtype=dtype))

    def __call__(self, x_RK: Tensor, then: str = "none", factor_RN: Tensor | None = None) -> Tensor:
        """Return y [R, N]."""
        rows = len(x_RK)
        y_RX = empty(rows, self._width, dtype=self.dtype)
        if rows:
            x, x_row = self._inputs(x_RK)
            factor, factor_row = self._none, 0
            if factor_RN is not None:
                factor_RX = self._widened(factor_RN)
                factor, factor_row = flat(factor_RX), factor_RX.stride(0)
            kernel = self.held.few if rows <= self.held.few_rows else self.held.many
            n_in = self.n_in + self.n_in % 2 if self.held.pairs else self.n_in
            two = self.held.pairs and kernel is not widen_and_multiply
            kernel(
                x, x_row, 2 if two and not self.held.dot else 1, self.held.arrays, n_in // 2 if two else n_in,
                self._bias, ACTIVATIONS[then], factor, factor_row, flat(y_RX), self._width, rows, self._width,
                scratch((rows + BLOCK) * PANEL),  # BLOCK is above ROWS
            )  # fmt: skip
        return y_RX if self._width == self.n_out else y_RX[:, : self.n_out].contiguous()

    def rows(self, index_R: Tensor) -> Tensor:
        """Return some rows of the weight, [R, K]: those of an embedding whose table is its model's head, too."""
        pairs, width = self.held.pairs, self.n_in + self.n_in % 2
        if not pairs or self.dtype not in LOOKUPS:
            return self.held.rows(index_R)[:, : self.n_in].to(self.dtype)
        row_RK = empty(len(index_R), width, dtype=self.dtype)
        bits, kernel = LOOKUPS[self.dtype]
        kernel(flat(row_RK.view(bits)), self.held.arrays[0], index_R.numpy(), width)
        return row_RK if width == self.n_in else row_RK[:, : self.n_in].contiguous()

    def outputs_from(self, first: int) -> PanelProduct:
        """Return the product of the outputs from `first` on, over the same memory. Raises ValueError within a panel."""
        if first % PANEL:
            raise ValueError(f"outputs from {first} on: a panel has {PANEL}")
        part, n_panels = copy(self), -(-self.n_out // PANEL)

        def rest(array: Any) -> Any:  # each array has as many elements for every panel
            return array[len(array) * (first // PANEL) // n_panels :] if isinstance(array, np.ndarray) else array

        arrays, rows = tuple(map(rest, self.held.arrays)), self.held.rows
        part.held = replace(self.held, arrays=arrays, rows=lambda index_R: rows(index_R + first))
        part.n_out = self.n_out - first
        part._width, part._bias = _width(part.n_out), self._bias[first:]
        return part

    def _inputs(self, x_RK: Tensor) -> tuple[np.ndarray[Any, Any], int]:
        """Return the rows as the kernel reads them, and the elements from one to the next."""
        x_RK, odd = self.held.ordered(x_RK), self.held.pairs and self.n_in % 2
        x_RK = F.pad(x_RK, (0, 1)) if odd else x_RK
        if self.held.dot:
            x_RK = x_RK.contiguous()
            pairs: np.ndarray[Any, Any] = x_RK.view(torch.int32).view(-1).numpy()
            return pairs, x_RK.shape[1] // 2
        x_RK = x_RK if self.held.few is multiply_integers else x_RK.float()  # others read float32
        x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
        return flat(x_RK), x_RK.stride(0)

    def _widened(self, factor_RN: Tensor) -> Tensor:
        """Return a factor with as many columns as whole vectors take."""
        missing = self._width - self.n_out
        if missing or factor_RN.stride(1) != 1 or factor_RN.dtype != self.dtype:
            factor_RN = F.pad(factor_RN.to(self.dtype), (0, missing)).contiguous()
        return factor_RN


def _width(n_out: int) -> int:
    """Return columns of a product's result: whole vectors."""
    return -(-n_out // LANES) * LANES


def held(weight_NK: Tensor | Quantised, dtype: torch.dtype) -> Held:
    """Lay a weight out in panels, for products with rows in `dtype`.

    Which kernel computes follows from the processor, the format and the number of rows:

    * float32: as held; on processors with 256-bit registers copied to a block for more than 6 rows, since it is read
      once for each 16 outputs there;
    * bfloat16 with rows in bfloat16: AMX if the processor has it and inputs are a multiple of 32, else its dot product
      if it has one (AVX512-BF16);
    * bfloat16 otherwise: widened as it is read, or for more than 6 rows on 256-bit registers a block at a time;
    * float16: widened a block at a time;
    * float8, nf4 and fp4: unpacked in registers for up to 6 rows, a block at a time for more; to bfloat16 for the dot
      product with rows in bfloat16, as above, else to float32 (`kernels/float8.py`);
    * integers, and codes of a table: with rows rounded to int8 (`kernels/integers.py`).

    The benchmark behind the table is `benchmarks.products`, a row for each format and number of rows; decision 035 has
    its figures. Arrays lie in huge pages, where the system has them.
    """
    if isinstance(weight_NK, Quantised):
        return _held_float(weight_NK, dtype) if weight_NK.is_float else _held_codes(weight_NK)
    n_in = weight_NK.shape[1]
    if weight_NK.dtype == torch.bfloat16:
        panels = _in_panels(F.pad(weight_NK, (0, 1)) if n_in % 2 else weight_NK, 2)
        arrays, rows = (panels.view(torch.int32).numpy(),), partial(_rows, panels, n_in + n_in % 2, 2)
        if _has_dot(dtype):
            kernel = multiply_by_amx if amx.usable() and n_in % amx.RUN == 0 else multiply
            return Held(arrays, rows, kernel, kernel, pairs=True, dot=True)
        return Held(arrays, rows, multiply, multiply if WIDE else widen_and_multiply, pairs=True)
    panels = _in_panels(weight_NK if weight_NK.dtype == torch.float16 else weight_NK.float())
    arrays, rows = (_array(panels),), partial(_rows, panels, n_in, 1)
    if weight_NK.dtype == torch.float16:
        return Held(arrays, rows)
    return Held(arrays, rows, multiply, multiply if WIDE else widen_and_multiply)


def _has_dot(dtype: torch.dtype) -> bool:
    """Return whether the processor multiplies pairs of bfloat16, and rows are such."""
    return dtype == torch.bfloat16 and machine.compiles("avx512_bf16")


def _held_float(weight: Quantised, dtype: torch.dtype) -> Held:
    """Hold float8 numbers, or codes of nf4 or fp4. Raises ValueError for another table of floats."""
    n_groups, width, bias = weight.scale_NX.shape[1], weight.shape[1] // 2, 1 if weight.table else BIAS
    if weight.table is not None and weight.table not in FLOAT_TABLES:
        raise ValueError(f"codes stand for the floats {weight.table}, must be those of nf4 or fp4")
    code_NK = weight.code_NK.contiguous()
    if weight.table is None:
        codes = _in_panels(code_NK.view(torch.int16))
    else:
        codes = _in_panels(code_NK[:, 0::2] | code_NK[:, 1::2] << 4).view(FLOAT_TABLES[weight.table])
    scales = _in_panels(weight.scales()[0] * bias)
    none = weight.rows(torch.empty(0, dtype=torch.int64))  # copies, so that no code is kept in addition to the panels

    def rows(index_R: Tensor) -> Tensor:
        code_RK = _rows(codes, width, 1, index_R)
        if none.table:
            code_RK = code_RK.view(torch.uint8)
            code_RK = torch.stack((code_RK & 15, code_RK >> 4), 2).flatten(1)
        scale_RX, zero_RX = _rows(scales, n_groups, 1, index_R) / bias, none.zero_NX.new_zeros(len(index_R), 1)
        return replace(none, code_NK=code_RK.view(none.code_NK.dtype), scale_NX=scale_RX, zero_NX=zero_RX).values()

    arrays = codes.numpy(), scales.numpy(), n_groups
    return Held(arrays, rows, multiply_float8, widen_and_multiply, dot=_has_dot(dtype))


def _held_codes(weight: Quantised) -> Held:
    # few combinations of types, each of which is compiled: all of these conversions are exact
    as_read: dict[str, Any] = {name: part.float() for name, part in weight.parts() if name in OUTER}
    read_as = SCALES.get(weight.scale_NX.dtype, weight.scale_NX.dtype)
    if read_as == torch.bfloat16 and weight.table is None:  # a table's are powers of two, one for 32 inputs
        read_as = torch.float32
    weight = replace(weight, **as_read, scale_NX=weight.scale_NX.to(read_as))
    (n_in, n_groups), small = (weight.shape[1], weight.scale_NX.shape[1]), weight.bits <= TABLE_BITS
    codes_NK = weight.code_NK.contiguous().view(torch.int32)
    if small:
        codes_NK = codes_NK[:, 0::2] | codes_NK[:, 1::2] << 4
    parts = {"code_NK": codes_NK} | {name: part for name, part in weight.parts() if name != "code_NK"}
    panels = {name: _in_panels(part) for name, part in parts.items()}
    in_order = [_array(panels[name]) if name in panels else np.empty(0, np.float32) for name in ARRAYS]
    if small:
        in_order[0] = in_order[0].view(np.uint32)
    widths = {name: part.shape[1] for name, part in parts.items()}
    none = weight.rows(torch.empty(0, dtype=torch.int64))  # copies, so that no code is kept in addition to the panels

    table = np.empty(0, np.float32)  # its type tells that there is none
    if weight.table is not None:
        table = np.tile(np.array(weight.table, np.uint8), -(-weight.shape[0] // PANEL))
    numbers = np.array(weight.table or range(1 << (TABLE_BITS if small else MAX_BITS)), np.float32)

    def rows(index_R: Tensor) -> Tensor:
        some: dict[str, Any] = {n: _rows(panels[n], widths[n], 1, index_R) for n in panels if n != "code_NK"}
        scale_RX, minimum_RX = replace(none, **some).scales()
        zero_RX = some["zero_NX"].float().expand(scale_RX.shape).contiguous()
        of_rows = (scale_RX, zero_RX, torch.zeros_like(scale_RX) if minimum_RX is None else minimum_RX)
        value_RK = empty(len(index_R), n_in)
        values_of_codes_into(
            flat(value_RK), in_order[0], index_R.numpy(), *map(flat, of_rows), numbers, widths["code_NK"]
        )
        return none.reordered(value_RK)

    return Held((*in_order, n_groups, table), rows, multiply_integers, multiply_integers, order_K=weight.order_K)


def scratch(floats: int) -> np.ndarray[Any, Any]:
    """Return memory for `floats` float32 of each thread of a kernel; this thread reuses it."""
    size = threads_in_use() * floats
    memory: np.ndarray[Any, Any] | None = getattr(_of_thread, "memory", None)
    if memory is None or len(memory) < size:
        memory = _of_thread.memory = torch.empty(size).numpy()  # aligned to cache lines
    return memory


def _in_panels(weight_NK: Tensor, together: int = 1) -> Tensor:
    """Copy a weight to panels, flat: for each panel, each run of `together` inputs, each output: these inputs."""
    n_out, n_in = weight_NK.shape
    panels_PKNt = _slabs.empty((-(-n_out // PANEL), n_in // together, PANEL, together), weight_NK.dtype)
    runs_NKt = weight_NK.unflatten(1, (-1, together))
    whole, rest = divmod(n_out, PANEL)
    panels_PKNt[:whole] = runs_NKt[: n_out - rest].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if rest:
        panels_PKNt[whole, :, :rest] = runs_NKt[n_out - rest :].transpose(0, 1)
    return kept(panels_PKNt.view(-1))


def _rows(panels: Tensor, n_in: int, together: int, index_R: Tensor) -> Tensor:
    """Return rows of the weight that was laid out in panels."""
    runs_PKNt = panels.view(-1, n_in // together, PANEL, together)
    rows_RK: Tensor = runs_PKNt[index_R // PANEL, :, index_R % PANEL].reshape(len(index_R), n_in)
    return rows_RK


def _array(panels: Tensor) -> np.ndarray[Any, Any]:
    """Return panels as kernels take them: float16 as its bits."""
    return panels.view(torch.int16).numpy().view(np.uint16) if panels.dtype == torch.float16 else flat(panels)

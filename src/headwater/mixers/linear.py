"""Products with weights: all of the model's, with rows that do not depend on how many rows there are.

R rows, K inputs, N outputs, V vocabulary, D width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater import machine
from headwater.mixers import numerics as numerics_of_process
from headwater.mixers.activations import sigmoid, silu
from headwater.mixers.numerics import Numerics

PACK_ROWS = 8  # the height that a packed layout is built for: with 1, one row takes a kernel of its own
# Least rows of a oneDNN product: one row takes another kernel if K ≥ 1,536, or if the weight is not packed; in
# bfloat16 four rows are faster than two (4.5 against 5.8 ms for all weights of a small model).
LEAST_ROWS = {torch.float32: 2, torch.bfloat16: 4}

LEAST_TIMES = 5  # that a product is timed

log = logging.getLogger("headwater.models")

Product = Callable[[Tensor], Tensor]


class Linear:
    """The product y = x Wᵀ + b, in which a row of y depends on its row of x alone, not on the number of rows.

    `weight_NK` is copied into the packed layout in packed mode, so the caller drops its own; with `shared` it is
    kept as it is (an embedding that is its model's head too), at the price of slower small heights.

    If the processor does not multiply the weight's dtype natively (`product_dtype`), the layout holds a float32 copy
    of the weight: inputs are widened, sums are rounded once, to the dtype of the inputs.
    """

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, numerics: Numerics | None = None, shared: bool = False
    ) -> None:
        self.numerics = _possible(numerics or numerics_of_process.current())
        self.n_out, self.n_in = weight_NK.shape
        self.dtype = weight_NK.dtype
        computes_in = product_dtype(weight_NK.dtype, weight_NK.device)
        self._widens = computes_in != self.dtype
        self.bias_N = None if bias_N is None else bias_N.to(computes_in)
        self._on_onednn = self.numerics.mode == "packed" and weight_NK.device.type == "cpu"
        self.least_rows = LEAST_ROWS.get(computes_in, 2) if self._on_onednn else 1
        weight_NK = weight_NK.to(computes_in)
        if self._on_onednn and (self._widens or not shared):
            weight_NK = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), PACK_ROWS)
        self._weight = weight_NK
        self._product = self._onednn if self._on_onednn else self._plain

    def __call__(self, x_RK: Tensor, n_prefill: int = 0) -> Tensor:
        """Return y; the first `n_prefill` rows are a step's prefill rows, which matters only if products are tiled."""
        rows = x_RK.shape[0]
        if rows == 0:
            return x_RK.new_empty(0, self.n_out)
        if self.numerics.mode != "tiled":
            return self._padded(x_RK, self.least_rows)
        tile = self.numerics
        groups = ((x_RK[:n_prefill], tile.prefill_tile), (x_RK[n_prefill:], tile.decode_tile))
        tiles_RN = [self._padded(t_RK, h) for x_GK, h in groups if len(x_GK) for t_RK in x_GK.split(h)]
        return tiles_RN[0] if len(tiles_RN) == 1 else torch.cat(tiles_RN)

    def swish(self, x_RK: Tensor, n_prefill: int = 0) -> Tensor:
        """Return silu(y); in packed mode the product applies it before the result is rounded and written."""
        return self._then("swish", silu, x_RK, n_prefill)

    def sigmoid(self, x_RK: Tensor, n_prefill: int = 0) -> Tensor:
        """Return sigmoid(y); in packed mode the product applies it before the result is rounded and written."""
        return self._then("sigmoid", sigmoid, x_RK, n_prefill)

    def times(self, x_RK: Tensor, factor_RN: Tensor, n_prefill: int = 0) -> Tensor:
        """Return y · factor; in packed mode the product applies it before the result is rounded and written."""
        if not self._on_onednn or len(x_RK) == 0:
            return self(x_RK, n_prefill).mul_(factor_RN)
        missing = (0, 0, 0, max(0, self.least_rows - len(x_RK)))
        x_PK, factor_PN = (F.pad(t, missing) if missing[-1] else t for t in (x_RK, factor_RN))
        product = torch.ops.mkldnn._linear_pointwise.binary
        x_PK, factor_PN = self._widened(x_PK).contiguous(), self._widened(factor_PN).contiguous()
        y_PN: Tensor = product(x_PK, factor_PN, self._weight, self.bias_N, "mul")
        return y_PN[: len(x_RK)].to(self.dtype)

    def _then(self, name: str, composed: Product, x_RK: Tensor, n_prefill: int) -> Tensor:
        """Apply the activation that oneDNN calls `name` to the product."""
        if not self._on_onednn or len(x_RK) == 0:
            return composed(self(x_RK, n_prefill))
        # At every height, one row included: the composed activation has other bits than oneDNN's.
        return self._padded(x_RK, self.least_rows, partial(self._onednn, then=name))

    def _padded(self, x_RK: Tensor, height: int, product: Product | None = None) -> Tensor:
        """Compute the product at `height` rows or more, padded with zeros."""
        product = product or self._product
        missing = height - x_RK.shape[0]
        if missing <= 0:
            return product(x_RK)
        return product(F.pad(x_RK, (0, 0, 0, missing)))[:-missing]

    def _onednn(self, x_RK: Tensor, then: str = "none") -> Tensor:
        x_RK = self._widened(x_RK).contiguous()
        y_RN: Tensor = torch.ops.mkldnn._linear_pointwise(x_RK, self._weight, self.bias_N, then, [], "")
        return y_RN.to(self.dtype)

    def _plain(self, x_RK: Tensor) -> Tensor:
        return F.linear(self._widened(x_RK), self._weight, self.bias_N).to(self.dtype)

    def _widened(self, x_RK: Tensor) -> Tensor:
        return x_RK.float() if self._widens else x_RK


def guarded_modes() -> tuple[str, ...]:
    """Return the modes of `Numerics` that can keep a row's bits with this torch, the faster one first."""
    return ("packed", "tiled") if _packs() else ("tiled",)


@cache
def _packs() -> bool:
    """Return whether torch has oneDNN's products with packed weights: private operations, which it may change."""
    eye = torch.eye(PACK_ROWS)
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(eye, PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(eye, weight, None, "swish", [], "")
        torch.ops.mkldnn._linear_pointwise.binary(eye, eye, weight, None, "mul")
    except (AttributeError, RuntimeError, TypeError) as error:
        found = str(error).splitlines()[0]
        log.warning("torch %s has no products with packed weights, so they are tiled: %s", torch.__version__, found)
        return False
    return True


def _possible(numerics: Numerics) -> Numerics:
    """Return the numerics, tiled in place of packed if this torch cannot pack."""
    return numerics if numerics.mode != "packed" or _packs() else replace(numerics, mode="tiled")


def product_dtype(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """Return the dtype that products with a weight of `dtype` are computed in: float32 if bfloat16 is not native.

    Without AVX512-BF16 or AMX a packed bfloat16 product takes 3 times as long as one in float32 (AVX-512), or torch
    has none and its fallback takes 5 to 50 times as long (AVX2).
    """
    emulated = dtype == torch.bfloat16 and torch.device(device).type == "cpu" and not machine.cpu().native_bfloat16
    return torch.float32 if emulated else dtype


def weight_layout(mode: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Describe how weights of `dtype` are kept for products: `packed float32 copies of bfloat16`."""
    stored, kept = (str(d).removeprefix("torch.") for d in (dtype, product_dtype(dtype, device)))
    form = mode if torch.device(device).type == "cpu" else "plain"
    return f"{form} {kept}" if kept == stored else f"{form} {kept} copies of {stored}"


def seconds_of(product: Product, x_RK: torch.Tensor, seconds: float = 0.1) -> float:
    """Return the least time of one product, of as many as fit into `seconds` and of at least 5: the first are slow."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(times) < LEAST_TIMES:
        product(x_RK)
        times.append(time.perf_counter() - start)
    return min(times)


def slowdown(n_in: int, n_out: int, dtype: torch.dtype, numerics: Numerics, rows: int = 256) -> float:
    """Measure the time of a product with a weight of `dtype` ÷ that with one in float32."""
    x_RK, weight_NK = torch.randn(rows, n_in), torch.randn(n_out, n_in)
    asked, plain = (
        seconds_of(Linear(weight_NK.to(of), numerics=numerics), x_RK.to(of)) for of in (dtype, torch.float32)
    )
    return asked / plain


class Embedding:
    """Rows of a table, in the dtype that the model computes in.

    The table may stay a view of the mapped file, in the file's dtype: then only the rows that are looked up are read.
    """

    def __init__(self, table_VD: Tensor, dtype: torch.dtype | None = None) -> None:
        self.table_VD = table_VD
        self.dtype = dtype or table_VD.dtype

    def __call__(self, token_N: Tensor) -> Tensor:
        return self.table_VD.index_select(0, token_N).to(self.dtype)

    def head(self) -> Linear:
        """Return the product with the same table, without a second copy of it."""
        return Linear(self.table_VD, shared=True)


def first_bad_height(product: Product, x_RK: Tensor, heights: Iterable[int]) -> int | None:
    """Return the first height at which a row has other bits than among all of `x_RK`, or None."""
    whole_RN = product(x_RK)
    for height in heights:
        first = torch.equal(product(x_RK[:height]), whole_RN[:height])
        if not (first and torch.equal(product(x_RK[-height:]), whole_RN[-height:])):
            return height
    return None

"""All products of the model with its weights; a row does not depend on the number of rows.

R rows, K inputs, N outputs, V vocabulary, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater import kernels
from headwater.mixers import numerics as numerics_of_process
from headwater.mixers.gpu import dense, has_kernels
from headwater.mixers.numerics import Numerics, same_bits
from headwater.mixers.products import OUTPUT_GRID, AnswersProduct, HeldWeight, TorchProduct, Weight
from headwater.mixers.quantised import Quantised

MIN_TIMINGS = 5  # of a product
PREFILL_TILE_OF_GPU = 1024  # rows: an H100 takes 28 µs for them, and 19 for 256 (1,024 by 7,168 weights)

Product = Callable[[Tensor], Tensor]


class Linear:
    """The product y = x Wᵀ + b, in which a row of y depends only on its row of x, not on the number of rows.

    The weight is held once, as stored: float32, bfloat16, float16, float8 or integers; one after the other if there are
    several of different formats, whose outputs are side by side. Inputs and results are in `dtype`.
    """

    def __init__(
        self,
        weight_NK: Weight | Sequence[Weight],
        bias_N: Tensor | None = None,
        numerics: Numerics | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        weights = [weight_NK] if isinstance(weight_NK, (Tensor, Quantised)) else list(weight_NK)
        self.numerics = _possible(numerics or numerics_of_process.current(), _device_of(weights[0]))
        self.n_out, self.n_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.dtype = dtype or (weights[0].dtype if isinstance(weights[0], Tensor) else torch.float32)
        heights = [weight.shape[0] for weight in weights]
        biases = [None] * len(weights) if bias_N is None else bias_N.split(heights)
        self._parts = [self._held(*part) for part in zip(weights, biases, strict=True)]
        self._outputs = [slice(sum(heights[:i]), sum(heights[: i + 1])) for i in range(len(heights))]
        on_gpu = not _on_cpu(_device_of(weights[0]))
        self._prefill_tile = PREFILL_TILE_OF_GPU if on_gpu else self.numerics.prefill_tile
        self._tiled = self.numerics.mode == "tiled" and any(isinstance(part, TorchProduct) for part in self._parts)

    def __call__(self, x_RK: Tensor, n_prefill: int) -> Tensor:
        """Return y; the first `n_prefill` rows are a step's prefill rows, which matters only if products are tiled."""
        return self._product(x_RK, n_prefill)

    def swish(self, x_RK: Tensor, n_prefill: int) -> Tensor:
        """Return silu(y)."""
        return self._product(x_RK, n_prefill, "swish")

    def sigmoid(self, x_RK: Tensor, n_prefill: int) -> Tensor:
        """Return sigmoid(y)."""
        return self._product(x_RK, n_prefill, "sigmoid")

    def times(self, x_RK: Tensor, factor_RN: Tensor, n_prefill: int) -> Tensor:
        """Return y · factor."""
        return self._product(x_RK, n_prefill, factor_RN=factor_RN)

    def opened(self, gate: Linear, x_RK: Tensor, n_prefill: int) -> Tensor:
        """Return y · silu(gate's y)."""
        n_rows, x_BK = len(x_RK), x_RK[n_prefill:]
        answers_BN = self._opened_by_kernel(gate, x_BK) if n_prefill < n_rows else None
        if answers_BN is None:
            return self.times(x_RK, gate.swish(x_RK, n_prefill), n_prefill)
        if not n_prefill:
            return answers_BN
        x_PK = x_RK[:n_prefill]
        return torch.cat([self.times(x_PK, gate.swish(x_PK, n_prefill), n_prefill), answers_BN])

    def _opened_by_kernel(self, gate: Linear, x_RK: Tensor) -> Tensor | None:
        """Compute y · silu(gate's y) of rows of decoding sequences by one kernel, if there is one."""
        if not len(self._by_kernel) == len(gate._by_kernel) == 1:
            return None
        (own,), (of_gate,) = self._by_kernel, gate._by_kernel
        return own.opened(of_gate, x_RK)

    @property
    def _by_kernel(self) -> list[AnswersProduct]:
        """The weights, if products are tiled and all have a kernel for rows of answers; else nothing."""
        found = [part for part in self._parts if isinstance(part, AnswersProduct)] if self._tiled else []
        return found if len(found) == len(self._parts) else []

    def rows(self, index_R: Tensor) -> Tensor:
        """Return rows of the weight in `dtype`, [R, K]; it must be one weight."""
        (part,) = self._parts
        return part.rows(index_R)

    def outputs_from(self, first: int) -> Linear:
        """Return the product of the outputs from `first` on, over the same memory. Raises ValueError for other places.

        `first` is the first output of a weight, or a multiple of OUTPUT_GRID after it.
        """
        rest, whole = copy(self), list(zip(self._parts, self._outputs, strict=True))
        if any(at.start < first < at.stop and (first - at.start) % OUTPUT_GRID for _, at in whole):
            raise ValueError(f"outputs from {first} on: must be a multiple of {OUTPUT_GRID} after a weight's first")
        rest._parts = [
            part if first <= at.start else part.outputs_from(first - at.start) for part, at in whole if first < at.stop
        ]
        rest._outputs = [slice(max(0, at.start - first), at.stop - first) for _, at in whole if first < at.stop]
        rest.n_out = self.n_out - first
        return rest

    def _held(self, weight_NK: Weight, bias_N: Tensor | None) -> HeldWeight:
        """Lay a weight out for the kernels if there are any, else as torch multiplies it.

        Integers and float8 are multiplied by kernels even where other weights are not, unless products have no guard.
        """
        on_cpu = _on_cpu(_device_of(weight_NK))
        quantised = isinstance(weight_NK, Quantised) and self.numerics.mode == "tiled"
        if kernels.available() and on_cpu and (self.numerics.mode == "compiled" or quantised):
            from headwater.mixers.panels import PanelProduct  # needs numba

            return PanelProduct(weight_NK, bias_N, self.dtype)
        if has_kernels(_device_of(weight_NK)) and isinstance(weight_NK, Tensor) and weight_NK.dtype == self.dtype:
            from headwater.mixers.gpu.product import ProductOnGpu  # needs Triton

            return ProductOnGpu(weight_NK, bias_N, self.dtype)
        return TorchProduct(weight_NK, bias_N, self.dtype)

    def _product(self, x_RK: Tensor, n_prefill: int, then: str = "none", factor_RN: Tensor | None = None) -> Tensor:
        rows = len(x_RK)
        if rows == 0:
            return x_RK.new_empty(0, self.n_out)
        if not self._tiled:
            return self._side_by_side(x_RK, then, factor_RN)
        by_kernel = self._by_kernel
        tiles = (
            (first, min(first + height, last), height)
            for start, last, height in (
                (0, n_prefill, self._prefill_tile),
                (n_prefill, n_prefill if by_kernel else rows, self.numerics.decode_tile),
            )
            for first in range(start, last, height)
        )
        done = [self._tile(x_RK, first, last, height, then, factor_RN) for first, last, height in tiles]
        if by_kernel and n_prefill < rows:
            of_answers = slice(n_prefill, rows)
            done.append(
                self._answers(by_kernel, x_RK[of_answers], then, None if factor_RN is None else factor_RN[of_answers])
            )
        return done[0] if len(done) == 1 else torch.cat(done)

    def _answers(self, by_kernel: list[AnswersProduct], x_RK: Tensor, then: str, factor_RN: Tensor | None) -> Tensor:
        """Compute rows of decoding sequences by kernels, whatever their number."""
        y_RN = x_RK.new_empty(len(x_RK), self.n_out, dtype=self.dtype)
        for kernel, at in zip(by_kernel, self._outputs, strict=True):
            kernel.answers_into(y_RN[:, at], x_RK, then, None if factor_RN is None else factor_RN[:, at])
        return y_RN

    def _tile(self, x_RK: Tensor, first: int, last: int, height: int, then: str, factor_RN: Tensor | None) -> Tensor:
        """Compute some rows at a fixed height, filled up with zeros."""
        x_TK, factor_TN = _filled_up(x_RK[first:last], height), None
        if factor_RN is not None:
            factor_TN = _filled_up(factor_RN[first:last], height)
        return self._side_by_side(x_TK, then, factor_TN)[: last - first]

    def _side_by_side(self, x_RK: Tensor, then: str, factor_RN: Tensor | None) -> Tensor:
        parts = (
            part(x_RK, then, None if factor_RN is None else factor_RN[:, at])
            for part, at in zip(self._parts, self._outputs, strict=True)
        )
        done = list(parts)
        return done[0] if len(done) == 1 else torch.cat(done, 1)


def _filled_up(x_RK: Tensor, height: int) -> Tensor:
    """Return rows, and zeros up to a height: contiguous and aligned, since other rows take another kernel."""
    return dense(x_RK) if len(x_RK) == height else F.pad(x_RK, (0, 0, 0, height - len(x_RK)))


def prompts_product(linear: Linear) -> Product:
    """Return the product of rows that are all of prompts."""
    return lambda x_RK: linear(x_RK, len(x_RK))


def answers_product(linear: Linear) -> Product:
    """Return the product of rows that are all of decoding sequences."""
    return lambda x_RK: linear(x_RK, 0)


def _possible(numerics: Numerics, device: torch.device | str) -> Numerics:
    """Return the numerics, tiled instead of compiled without numba or on another device than the CPU."""
    can = numerics.mode != "compiled" or (kernels.available() and _on_cpu(device))
    return numerics if can else replace(numerics, mode="tiled")


def _device_of(weight: Weight) -> torch.device | str:
    return "cpu" if isinstance(weight, Quantised) else weight.device


def _on_cpu(device: torch.device | str) -> bool:
    """Return whether a CPU's kernels compute products there."""
    return torch.device(device).type == "cpu" and not has_kernels(device)


def guarded_modes(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Return the modes of `Numerics` that can keep a row's bits on a device, the faster one first."""
    return ("compiled", "tiled") if _on_cpu(device) and kernels.available() else ("tiled",)


def weight_layout(mode: str, device: torch.device | str = "cpu") -> str:
    """Describe how weights are laid out for products."""
    return {"compiled": "panels of 64 outputs", "tiled": "rows, multiplied in tiles"}.get(
        mode if torch.device(device).type == "cpu" else "plain", "rows"
    )


def seconds_of(product: Product, x_RK: torch.Tensor, seconds: float = 0.1) -> float:
    """Return the shortest time of a product among those that fit into `seconds`, at least 5: the first are slow."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(times) < MIN_TIMINGS:
        product(x_RK)
        times.append(time.perf_counter() - start)
    return min(times)


def slowdown(n_in: int, n_out: int, dtype: torch.dtype, numerics: Numerics, rows: int = 256) -> float:
    """Measure the time of a prompt's product with a weight of `dtype` ÷ that with one in float32."""
    x_RK, weight_NK = torch.randn(rows, n_in), torch.randn(n_out, n_in)
    asked, plain = (
        seconds_of(prompts_product(Linear(weight_NK.to(of), numerics=numerics)), x_RK.to(of))
        for of in (dtype, torch.float32)
    )
    return asked / plain


class Embedding:
    """Rows of a table, in the dtype that the model computes in. The head's product may be the table, if it is tied."""

    def __init__(self, table_VD: Weight | Linear, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or (torch.float32 if isinstance(table_VD, Quantised) else table_VD.dtype)
        self._held = table_VD if isinstance(table_VD, Linear) else TorchProduct(table_VD, None, self.dtype)

    def __call__(self, token_N: Tensor) -> Tensor:
        return self._held.rows(token_N)

    @property
    def table_VD(self) -> Tensor | None:
        """The table as it is stored; None if it is held for a head, or as integers."""
        table_VD = self._held.weight_NK if isinstance(self._held, TorchProduct) else None
        return table_VD if isinstance(table_VD, Tensor) else None


def first_bad_height(product: Product, x_RK: Tensor, heights: Iterable[int]) -> int | None:
    """Return the first height at which a row has other bits than among all of `x_RK`, or None."""
    whole_RN = product(x_RK)
    for height in heights:
        first = same_bits(product(x_RK[:height]), whole_RN[:height])
        if not (first and same_bits(product(x_RK[-height:]), whole_RN[-height:])):
            return height
    return None

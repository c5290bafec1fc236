"""Products with one weight: what a layout of weights must offer, and the layout that torch multiplies.

R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater import machine
from headwater.mixers.activations import sigmoid, silu
from headwater.mixers.quantised import Quantised
from headwater.mixers.weight_memory import kept

OUTPUT_GRID = 64  # a product of some outputs begins at a multiple of it
CONVERTED_BYTES = 32 * 2**20  # of a weight, that torch converts at a time
COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda y_RN: y_RN, "swish": silu, "sigmoid": sigmoid}

Weight = Tensor | Quantised


class HeldWeight(Protocol):
    """A weight in the layout of one kind of product."""

    def __call__(self, x_RK: Tensor, then: str = "none", factor_RN: Tensor | None = None) -> Tensor:
        """Return then(x Wᵀ + b) · factor."""

    def rows(self, index_R: Tensor) -> Tensor:
        """Return rows of the weight."""

    def outputs_from(self, first: int) -> HeldWeight:
        """Return the product of the outputs from `first` on, a multiple of WHOLE_OUTPUTS, over the same memory."""


@runtime_checkable
class AnswersProduct(HeldWeight, Protocol):
    """A weight with a kernel for rows of decoding sequences, of any number, where products are tiled otherwise."""

    def answers_into(self, out_RN: Tensor, x_RK: Tensor, then: str, factor_RN: Tensor | None) -> None:
        """Write then(x Wᵀ + b) · factor. Rows of the result may be strided."""

    def opened(self, gate: Self, x_RK: Tensor) -> Tensor | None:
        """Return (x Wᵀ) · silu(x Gᵀ), G the gate's weight; None if a product has a bias."""


def rows(weight: Weight, at: Tensor) -> Weight:
    """Return some outputs of a weight, in the order of `at`, int64."""
    return weight[at] if isinstance(weight, Tensor) else weight.rows(at)


class TorchProduct:
    """The reference: the weight as stored, of which torch multiplies a block of outputs at a time."""

    def __init__(self, weight_NK: Weight, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        # a copy, so that nothing keeps a checkpoint's file mapped
        self.weight_NK = kept(weight_NK.clone()) if isinstance(weight_NK, Tensor) else weight_NK.clone()
        self.dtype = dtype
        on_gpu = isinstance(weight_NK, Tensor) and weight_NK.device.type != "cpu"
        self.computes_in = dtype if on_gpu else product_dtype(dtype)
        self.bias_N = None if bias_N is None else bias_N.to(self.computes_in)

    def __call__(self, x_RK: Tensor, then: str = "none", factor_RN: Tensor | None = None) -> Tensor:
        x_RK = x_RK.to(self.computes_in)
        parts = [F.linear(x_RK, part_NK, bias_N) for part_NK, bias_N in self._blocks()]
        y_RN: Tensor = COMPOSED[then]((parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(self.dtype))
        return y_RN if factor_RN is None else y_RN.mul_(factor_RN)

    def rows(self, index_R: Tensor) -> Tensor:
        if isinstance(self.weight_NK, Quantised):
            return self.weight_NK.rows(index_R).values().to(self.dtype)
        return self.weight_NK.index_select(0, index_R).to(self.dtype)

    def outputs_from(self, first: int) -> TorchProduct:
        part, rest = copy(self), slice(first, None)
        part.weight_NK = self.weight_NK[rest] if isinstance(self.weight_NK, Tensor) else self.weight_NK.rows(rest)
        part.bias_N = None if self.bias_N is None else self.bias_N[rest]
        return part

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the weight and the bias in the dtype of products."""
        n_out, n_in = self.weight_NK.shape
        if isinstance(self.weight_NK, Tensor) and self.weight_NK.dtype == self.computes_in:
            yield self.weight_NK, self.bias_N
            return
        height = max(1, CONVERTED_BYTES // (4 * n_in))
        for at in (slice(first, first + height) for first in range(0, n_out, height)):
            some = self.weight_NK[at] if isinstance(self.weight_NK, Tensor) else self.weight_NK.rows(at).values()
            yield some.to(self.computes_in), None if self.bias_N is None else self.bias_N[at]


def product_dtype(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """Return the dtype that torch's products in `dtype` are computed in: float32 if bfloat16 is not native.

    Without AVX512-BF16 or AMX torch's bfloat16 product takes 5 to 50 times as long.
    """
    emulated = dtype == torch.bfloat16 and torch.device(device).type == "cpu" and not machine.cpu().native_bfloat16
    return torch.float32 if emulated else dtype

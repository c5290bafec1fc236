"""A recurrent layer on a CPU: all decoding rows of a step by one call of a kernel, prefill by another one or by torch.

N rows of a step, B decoding sequences, D model width, X trailing dimensions of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from headwater.kernels import drafts
from headwater.kernels.arrays import flat
from headwater.kernels.recording import constant, empty
from headwater.mixers import tails
from headwater.mixers.batch import Rows, StepBatch
from headwater.mixers.cpu.recurrent_kernels import (
    GatedDeltaNetKernel,
    KimiDeltaAttentionKernel,
    LightningAttentionKernel,
    Memory,
    SelectiveStateSpaceKernel,
    StateSpaceDualKernel,
)
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.last_value import LastValue
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import Round


class Kernel(Protocol):
    """The kernel of one mixer's decode, with its weights."""

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        """Write the inputs of `out_proj` of decoding rows from `products` of them; update the states of their slots."""


@runtime_checkable
class PrefillKernel(Protocol):
    """The kernel of one mixer's prefill, with its weights."""

    prefills: bool  # computes the layer's widths

    def prefill_into(self, out_NX: Tensor, products: tuple[Tensor, ...], together: Round, memory: Memory) -> None:
        """Write the inputs of `out_proj` of slices' rows; update the states of their slots, write the rows of saves."""


KERNELS: dict[type[RecurrentMixer[Any]], Callable[[Any], Kernel]] = {
    GatedDeltaNet: GatedDeltaNetKernel,
    KimiDeltaAttention: KimiDeltaAttentionKernel,
    LightningAttention: LightningAttentionKernel,
    SelectiveStateSpace: SelectiveStateSpaceKernel,
    StateSpaceDual: StateSpaceDualKernel,
}


class RecurrentOnCpu:
    """One mixer with its kernel."""

    def __init__(self, mixer: RecurrentMixer[Any], kernel: Kernel) -> None:
        self.mixer, self.kernel = mixer, kernel
        self.prefill = kernel if isinstance(kernel, PrefillKernel) and kernel.prefills else None
        self._memory = LastValue(Memory.of)  # of the states, which are the same from step to step

    def forward(self, x_ND: Tensor, batch: StepBatch, state: LayerState) -> Tensor:
        """Compute the layer as `RecurrentMixer.forward` does; what kernels compute is close to its own."""
        out_NX = tails.outputs(self, self.mixer.products(x_ND, batch), batch, state)
        return self.mixer.out_proj(out_NX, batch.n_prefill)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.mixer.without_gate(products)

    def outputs(self, products: tuple[Tensor, ...], batch: StepBatch, state: LayerState) -> Tensor:
        """Return the inputs of the last projection from the products before the recurrence; update states."""
        n_rows, at = len(products[0]), batch.decode_rows
        out_NX = empty(n_rows, self.mixer.out_proj.n_in, dtype=products[-1].dtype)
        if batch.n_decode:
            of_decode = products if at == slice(0, n_rows) else tuple(product[at] for product in products)
            self.decode_into(out_NX[at], of_decode, batch, state)
        if batch.slices and self.prefill is not None:
            self._prefill_into(self.prefill, out_NX, products, batch, state)
        elif batch.slices:
            rows = self.mixer.rows(products, batch)
            for together in batch.rounds:
                self.mixer.prefill_into(rows, together, state)
            whole_NX = rows.out_NX.flatten(1)
            whole_NX[at] = out_NX[at]
            out_NX = whole_NX
        return out_NX

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, state: LayerState) -> None:
        """Write the inputs of `out_proj` of decoding rows; update the states of their slots in place."""
        memory = self._memory_of(state)
        if not batch.speculates:
            self.kernel.decode_into(out_BX, products, batch, memory)
            return
        whole = batch.with_accepted_for_kernels
        sources, keeps = whole.copies
        with constant():
            state.kept.make_room(products, len(state.recurrent))
        parts = tuple(empty(len(sources), *product.shape[1:], dtype=product.dtype) for product in products)
        for part_WX, product_BX, kept_SAX in zip(parts, products, state.kept.parts, strict=True):
            _gather_into(part_WX, product_BX, kept_SAX, sources, keeps)
        all_WX = empty(len(sources), out_BX.shape[1], dtype=out_BX.dtype)
        self.kernel.decode_into(all_WX, parts, whole.batch, memory)
        _gather_into(out_BX, all_WX, all_WX, whole.own_B.numpy(), keeps[:0])

    def _prefill_into(
        self, kernel: PrefillKernel, out_NX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, state: LayerState
    ) -> None:
        """Write the inputs of `out_proj` of slices' rows by a kernel; transitions, which few slices need, by torch."""
        for together in batch.rounds:
            self.mixer.compose_into(state, together.slices)
            if any(s.transition is not None for s in together.slices):
                self.mixer.transitions_into(self.mixer.rows(products, batch), together.slices, state)
            kernel.prefill_into(out_NX, products, together, self._memory_of(state))

    def _memory_of(self, state: LayerState) -> Memory:
        return self._memory.of(state.recurrent, state)


def _gather_into(out_WX: Tensor, rows_BX: Tensor, kept_SAX: Tensor, sources: Rows, keeps: Rows) -> None:
    """Write rows, and keep some, as `kernels.drafts.gather_into` does; each row is contiguous."""
    width, row = (n * rows_BX.element_size() for n in (rows_BX[0].numel(), rows_BX.stride(0)))
    out, rows, kept = (flat(x).view(np.uint8) for x in (out_WX, rows_BX, kept_SAX))
    drafts.gather_into(out, rows, row, kept, sources, keeps, width)


def on_cpu(mixer: RecurrentMixer[Any]) -> RecurrentMixer[Any] | RecurrentOnCpu:
    """Return a mixer with its kernel, or as it is if it has none."""
    kernel = KERNELS.get(type(mixer))
    return mixer if kernel is None else RecurrentOnCpu(mixer, kernel(mixer))

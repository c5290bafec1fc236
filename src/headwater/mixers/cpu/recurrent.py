"""A recurrent layer on a CPU: all decoding rows of a step by one call of a kernel, prefill by another one or by torch.

N rows of a step, B decoding sequences, D model width, X trailing dimensions of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headwater.kernels import delta_chunk, drafts, gdn, kda, lightning, mamba, mamba2, short_conv
from headwater.kernels.convolution import NUMBERS_PER_SLICE
from headwater.kernels.recording import constant, empty, flat
from headwater.kernels.vectors import LANES
from headwater.mixers import tails
from headwater.mixers.activations import LOG2_E
from headwater.mixers.batch import LastValue, Rows, StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.panels import scratch
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.short_conv import GatedShortConvolution
from headwater.mixers.slices import CHUNK, Chunk, Round

Array = np.ndarray[Any, Any]

NO_NUMBERS: Array = np.empty(0, np.float32)


@dataclass(frozen=True)
class Memory:
    """State memory of one layer: all rows in one flat array, and the elements from each row to the next."""

    states: Array
    state_row: int
    stored: Array  # inputs of the convolution; empty if there is none
    stored_row: int

    @classmethod
    def of(cls, state: LayerState) -> Memory:
        conv = torch.empty(0, 0) if state.conv is None else state.conv
        return cls(flat(state.recurrent), state.recurrent.stride(0), flat(conv), conv.stride(0))


def padded(vector: Tensor) -> Array:
    """Copy a vector, float32, followed by zeros: whole vectors of a kernel can be read from any of its elements."""
    array: Array = torch.cat((vector.float().flatten(), vector.new_zeros(LANES, dtype=torch.float32))).numpy()
    return array


def taps_of(convolution: ShortConvolution) -> Array:
    """Return the taps of all channels, the oldest input's first, then the biases: rows padded by a vector of zeros."""
    rows_WC = [*convolution.weight_WC]
    bias_C = torch.zeros_like(rows_WC[0]) if convolution.bias_C is None else convolution.bias_C
    return np.concatenate([padded(row_C) for row_C in (*rows_WC, bias_C)])


class GatedDeltaNetKernel:
    """Decoding and prefill of Gated DeltaNet."""

    def __init__(self, mixer: GatedDeltaNet) -> None:
        s = mixer.shape
        self.taps, self.norm = taps_of(mixer.convolution), padded(mixer.norm_V)
        strength_H = torch.full_like(mixer.decay_H, s.strength)
        self.gates = torch.cat((mixer.decay_H, mixer.dt_bias_H, strength_H)).numpy()
        self.sizes = (s.k_heads, s.v_heads, s.k_dim, s.v_dim, mixer.convolution.before)
        self.eps = s.norm_eps
        self.prefills = s.k_dim % LANES == 0 and s.v_dim % LANES == 0
        self._floats = delta_chunk.floats_of(s.k_dim, s.v_dim, mixer.convolution.before, s.v_heads // s.k_heads)

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        (projected_BE,) = products
        gdn.decode_into(
            flat(out_BX), flat(projected_BE), *batch.decode_sequences,
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.gates, self.norm, self.sizes, self.eps,
        )  # fmt: skip

    def prefill_into(self, out_NX: Tensor, products: tuple[Tensor, ...], together: Round, memory: Memory) -> None:
        (projected_NE,) = products
        projected = flat(projected_NE)
        assert projected.dtype == memory.stored.dtype  # inputs are stored without conversion
        gdn.prefill_into(
            flat(out_NX), projected, ragged_of(together), len(together.slices),
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.gates, self.norm, self.sizes, self.eps, scratch(self._floats), self._floats,
        )  # fmt: skip


class KimiDeltaAttentionKernel:
    """Decoding of Kimi Delta Attention."""

    def __init__(self, mixer: KimiDeltaAttention) -> None:
        s = mixer.shape
        self.taps, self.norm = taps_of(mixer.convolution), padded(mixer.norm_V)
        self.rate, self.bias = padded(mixer.rate_X), padded(mixer.dt_bias_X)
        self.sizes = (s.heads, s.head_dim, mixer.convolution.before)
        self.lowest = 0.0 if s.lowest is None else s.lowest
        self.eps = s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        rows = tuple(product.stride(0) for product in products)
        kda.decode_into(
            flat(out_BX), *map(flat, products), rows, *batch.decode_sequences,
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.rate, self.bias, self.norm, self.sizes, self.lowest, self.eps,
        )  # fmt: skip


class LightningAttentionKernel:
    """Decoding of lightning attention."""

    def __init__(self, mixer: LightningAttention) -> None:
        s = mixer.shape
        self.rotation, self.norm = mixer.rotation, padded(mixer.norm_QX)
        self.decays = mixer.decays.power_PH[1].clone().numpy()
        of_queries_keys = mixer.qk_norm_21K
        self.qk_norm = NO_NUMBERS if of_queries_keys is None else np.concatenate([padded(w) for w in of_queries_keys])
        pairs = 0 if s.rotary is None else s.rotary.dim // 2
        self.sizes = (s.heads, s.head_dim, s.norm_groups, pairs)
        self.scale, self.eps = float(s.scale), s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        mixed_BC, gate_BX = products
        turns = NO_NUMBERS if self.rotation is None else flat(self.rotation.at(batch.position_N)[batch.decode_rows])
        lightning.decode_into(
            flat(out_BX), flat(mixed_BC), flat(gate_BX), (mixed_BC.stride(0), gate_BX.stride(0)), turns,
            *batch.decode_sequences, memory.states, memory.state_row,
            self.decays, self.qk_norm, self.norm, self.sizes, self.scale, self.eps,
        )  # fmt: skip


class SelectiveStateSpaceKernel:
    """Decoding of Mamba-1 by two kernels; torch computes the products of steps between them."""

    def __init__(self, mixer: SelectiveStateSpace) -> None:
        s = mixer.shape
        self.mixer, self.before = mixer, mixer.convolution.before
        self.taps, self.bias, self.skip = taps_of(mixer.convolution), padded(mixer.dt_bias_C), padded(mixer.skip_C)
        self.rate = np.concatenate([padded(rate_C / LOG2_E) for rate_C in mixer.log2_rate_EC])
        self.sizes = (s.inner, s.state)

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        (projected_BE,) = products
        projected, sequences, channels = flat(projected_BE), batch.decode_sequences, self.sizes[0]
        x_BP = empty(len(out_BX), -(-channels // mamba.BLOCK) * mamba.BLOCK)
        x = flat(x_BP)
        mamba.convolve_rows_into(
            x, projected, *sequences, self.taps, memory.stored, memory.stored_row, channels, self.before
        )
        of_steps = self.mixer.step_products(x_BP[:, :channels], 0)
        mamba.scan_into(
            flat(out_BX), x, projected, *map(flat, of_steps), tuple(part.stride(0) for part in of_steps), *sequences,
            memory.states, memory.state_row, self.rate, self.bias, self.skip, self.sizes,
        )  # fmt: skip


class GatedShortConvolutionKernel:
    """Decoding and prefill of the gated short convolution."""

    prefills = True

    def __init__(self, mixer: GatedShortConvolution) -> None:
        self.taps, self.sizes = taps_of(mixer.inputs_convolution), (mixer.shape.hidden, mixer.inputs_convolution.before)

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        rows = tuple(product.stride(0) for product in products)
        short_conv.decode_into(
            flat(out_BX), *map(flat, products), rows, *batch.decode_sequences, memory.states, memory.state_row,
            self.taps, self.sizes,
        )  # fmt: skip

    def prefill_into(self, out_NX: Tensor, products: tuple[Tensor, ...], together: Round, memory: Memory) -> None:
        rows, ragged = tuple(product.stride(0) for product in products), ragged_of(together)
        short_conv.prefill_into(
            flat(out_NX), *map(flat, products), rows, ragged, len(together.slices), memory.states, memory.state_row,
            self.taps, self.sizes,
        )  # fmt: skip


class StateSpaceDualKernel:
    """Decoding of Mamba-2."""

    def __init__(self, mixer: StateSpaceDual) -> None:
        s = mixer.shape
        self.taps = taps_of(mixer.convolution)
        self.of_heads = torch.cat((mixer.rate_H, mixer.dt_bias_H, mixer.skip_H)).numpy()
        self.norm = padded(torch.ones(s.inner) if mixer.norm_I is None else mixer.norm_I)
        self.sizes = (s.heads, s.groups, s.head_dim, s.state, mixer.convolution.before)
        self.scales, self.limits = (float(s.scales[0]), float(s.scales[-1])), tuple(map(float, s.step_limits))
        self.order = 0 if not s.normed else 2 if s.norm_first else 1
        self.eps = s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        (projected_BE,) = products
        mamba2.decode_into(
            flat(out_BX), flat(projected_BE), *batch.decode_sequences,
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.of_heads, self.norm, self.sizes, self.scales, self.limits, self.order, self.eps,
        )  # fmt: skip


@lru_cache(maxsize=8)
def ragged_of(together: Round) -> Array:
    """Return three lists of int64 numbers in one array, which all layers of a step share.

    [S, 5]: the first row of a slice in the step, its number of rows, its slot, how many of its first rows give no
    output, and the index of its first chunk in the second list. [n + 1]: the index of a chunk's rows in the third
    list, and the index of that list's end. The third list: rows of the state memory that receive the state after a
    chunk. Indices are those of the whole array.
    """
    slices = together.slices
    chunks = [[Chunk(s, i) for i in range(-(-s.length // CHUNK))] for s in slices]
    rows = [chunk.state_rows for chunk in chain(*chunks)]
    first_chunk = NUMBERS_PER_SLICE * len(slices)
    firsts = accumulate(map(len, chunks), initial=first_chunk)
    numbers = [
        number
        for s, first in zip(slices, firsts, strict=False)
        for number in (s.first, s.length, s.slot, s.unread, first)
    ]
    numbers += accumulate(map(len, rows), initial=first_chunk + len(rows) + 1)
    return np.array([*numbers, *chain(*rows)], np.int64)


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
    GatedShortConvolution: GatedShortConvolutionKernel,
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

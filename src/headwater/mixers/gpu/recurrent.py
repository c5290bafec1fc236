"""A recurrent layer on a GPU: a few kernels for all slices of a round, and one batch of decoding rows.

P prefill rows, B decoding sequences, C channels, R rows of the state memory, X any trailing dimensions of the mixer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from headwater.mixers import tails
from headwater.mixers.batch import StepBatch
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.gpu.gdn import GatedDeltaNetKernels
from headwater.mixers.gpu.kda import KimiDeltaAttentionKernels
from headwater.mixers.gpu.mamba import SelectiveStateSpaceKernels
from headwater.mixers.gpu.mamba2 import StateSpaceDualKernels
from headwater.mixers.gpu.pointwise import convolve_tokens
from headwater.mixers.gpu.ragged import Ragged, convolve, ragged_of
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.recurrent import LayerState, RecurrentMixer, Rows, decoding
from headwater.mixers.short_conv import GatedShortConvolution
from headwater.mixers.slices import Round


class Kernels(Protocol):
    """The kernels of one mixer's recurrence; `mixed` is float32, and convolved if there is a convolution."""

    def prefill(self, mixed_PC: Tensor, gates_PX: Tensor, state_RX: Tensor, ragged: Ragged) -> Tensor:
        """Return what all slices' rows read, a token a row; write slots and rows of saves."""

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_RX: Tensor, slot_B: Tensor) -> Tensor:
        """Return what one token of each sequence reads; update their slots in place."""


class GatedShortConvolutionKernels:
    """The kernels of a convolution, whose state is all that a gated short convolution has."""

    def __init__(self, mixer: GatedShortConvolution) -> None:
        self.taps = mixer.inputs_convolution.taps

    def prefill(self, mixed_PC: Tensor, gates_PX: Tensor, state_RX: Tensor, ragged: Ragged) -> Tensor:
        return convolve(mixed_PC, *self.taps, state_RX.mT, ragged)

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_RX: Tensor, slot_B: Tensor) -> Tensor:
        return convolve_tokens(mixed_BC, *self.taps, state_RX.mT, slot_B)


KERNELS: dict[type[RecurrentMixer[Any]], Callable[[Any], Kernels]] = {
    GatedDeltaNet: GatedDeltaNetKernels,
    KimiDeltaAttention: KimiDeltaAttentionKernels,
    SelectiveStateSpace: SelectiveStateSpaceKernels,
    StateSpaceDual: StateSpaceDualKernels,
    GatedShortConvolution: GatedShortConvolutionKernels,
}


class RecurrentOnGpu:
    """One mixer with its kernels. A mixer without kernels computes chunks in torch and decodes copies of states."""

    def __init__(self, mixer: RecurrentMixer[Any]) -> None:
        self.mixer = mixer
        kernels = KERNELS.get(type(mixer))
        self.kernels = None if kernels is None else kernels(mixer)

    def forward(self, x_ND: Tensor, batch: StepBatch, state: LayerState) -> Tensor:
        """Compute the layer as `RecurrentMixer.forward` does; in decode the host never waits for the device."""
        out_NX = tails.outputs(self, self.mixer.products(x_ND, batch), batch, state)
        return self.mixer.out_proj(out_NX, batch.n_prefill)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.mixer.without_gate(products)

    def outputs(self, products: tuple[Tensor, ...], batch: StepBatch, state: LayerState) -> Tensor:
        """Return the inputs of the last projection from the products before the recurrence; update states."""
        rows = self.mixer.rows(products, batch)
        for together in batch.rounds:
            if self.kernels is None:
                self.mixer.prefill_into(rows, together, state)
            else:
                self._prefill_into(rows, together, state)
        decoding(rows, batch, state, self._decode_into)
        return rows.out_NX.flatten(1)

    def _decode_into(self, rows: Rows, at: slice, slot_B: Tensor, state: LayerState) -> None:
        read_BX = self.decode(rows.mixed_NC[at], rows.gates_NX[at], slot_B, state)
        self.mixer.finish_into(rows, at, read_BX)

    def _prefill_into(self, rows: Rows, together: Round, state: LayerState) -> None:
        self.mixer.compose_into(state, together.slices)
        self.mixer.transitions_into(rows, together.slices, state)
        mixed_PC, gates_PX = together.of(rows.mixed_NC), together.of(rows.gates_NX)
        if not len(mixed_PC):
            return
        read_PX = self.prefill(mixed_PC, gates_PX, ragged_of(together), state)
        for at, read_nX in zip(together.rows, read_PX.split([at.stop - at.start for at in together.rows]), strict=True):
            self.mixer.finish_into(rows, at, read_nX)

    def prefill(self, mixed_PC: Tensor, gates_PX: Tensor, ragged: Ragged, state: LayerState) -> Tensor:
        """Return what the rows of ragged slices read, by the kernels."""
        assert self.kernels is not None
        convolution = self.mixer.convolution
        if convolution is not None and state.conv is not None:
            mixed_PC = convolve(mixed_PC, *convolution.taps, state.conv, ragged)
        return self.kernels.prefill(mixed_PC.float(), gates_PX, state.recurrent, ragged)

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, slot_B: Tensor, state: LayerState) -> Tensor:
        """Return what the decoding rows read. The host waits for nothing, so this can be recorded as a graph."""
        if self.kernels is None:
            return self.mixer.decode_at(mixed_BC, gates_BX, slot_B, state)
        convolution = self.mixer.convolution
        if convolution is None or state.conv is None:
            return self.kernels.decode(mixed_BC.float(), gates_BX, state.recurrent, slot_B)
        convolved_BC = convolve_tokens(mixed_BC, *convolution.taps, state.conv, slot_B)
        return self.kernels.decode(convolved_BC, gates_BX, state.recurrent, slot_B)

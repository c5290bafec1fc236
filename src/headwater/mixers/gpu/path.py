"""How a recurrent layer works through a step on a GPU: a few kernels for all slices, and one batch of decoding rows.

P prefill rows, B decoding sequences, C channels, R rows of the state memory, X whatever the mixer takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gpu.convolution import convolve
from headwater.mixers.gpu.ragged import Ragged


class Kernels(Protocol):
    """A mixer's recurrence; `mixed` is float32, and convolved where there is a convolution."""

    def prefill(
        self, mixed_PC: torch.Tensor, gates_PX: torch.Tensor, state_RX: torch.Tensor, ragged: Ragged
    ) -> torch.Tensor:
        """What all slices' rows read, a token a row; slots and rows of saves are written."""

    def decode(
        self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_RX: torch.Tensor, slot_B: torch.Tensor
    ) -> torch.Tensor:
        """What one token of each sequence reads; their slots move on in place."""


Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # as `RecurrentMixer.decode`


class GpuPath:
    """One layer's kernels, and its convolution's. Without kernels, `composed` decodes copies of states."""

    def __init__(self, kernels: Kernels | None, composed: Decode, convolution: ShortConvolution | None) -> None:
        self.kernels, self.composed, self.convolution = kernels, composed, convolution

    def prefill(
        self,
        mixed_PC: torch.Tensor,
        gates_PX: torch.Tensor,
        ragged: Ragged,
        recurrent_RX: torch.Tensor,
        conv_RCw: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the rows of ragged slices read, where there are kernels."""
        assert self.kernels is not None
        if self.convolution is not None and conv_RCw is not None:
            c = self.convolution
            mixed_PC = convolve(mixed_PC, c.weight_WC, c.bias_C, conv_RCw, ragged)
        return self.kernels.prefill(mixed_PC.float(), gates_PX, recurrent_RX, ragged)

    def decode(
        self,
        mixed_BC: torch.Tensor,
        gates_BX: torch.Tensor,
        batch: StepBatch,
        recurrent_RX: torch.Tensor,
        conv_RCw: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the decoding rows read. The host waits for nothing, so it can be recorded as a graph."""
        slot_B = batch.decode_slot_B
        if self.convolution is not None and conv_RCw is not None:
            conv_BCw = conv_RCw.index_select(0, slot_B)
            mixed_BC = self.convolution.decode(mixed_BC, conv_BCw)
            conv_RCw.index_copy_(0, slot_B, conv_BCw)
        if self.kernels is not None:
            return self.kernels.decode(mixed_BC.float(), gates_BX, recurrent_RX, slot_B)
        state_BX = recurrent_RX.index_select(0, slot_B)
        read_BX = self.composed(mixed_BC.float(), gates_BX, state_BX)
        recurrent_RX.index_copy_(0, slot_B, state_BX)
        return read_BX

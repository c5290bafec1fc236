"""Gated short convolution: y = C · conv(B · x), a causal depthwise convolution of a few taps (LFM2, arXiv 2511.23404).

The state is the last w inputs B · x, in the dtype of the model: the convolution reads them as they were computed, so a
state that was stored continues with the same bits. The transition of a range is its number of tokens: the inputs move
up, and those of the range follow them. A range of w tokens or more forgets all earlier ones.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, B decoding sequences, C channels (of the model),
W taps, w = W − 1, L = w + t, M = n. Chunks are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.layers.short_conv import ShortConv
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

CHUNKS_A_BLOCK = 4  # whose rows and windows fit in cache at 2,048 channels


@dataclass(frozen=True)
class Chunks:
    """Inputs of chunks, each of which follows a state."""

    mixed_ntC: Tensor
    lengths: list[int]  # tokens of each chunk
    convolution: ShortConvolution

    def advance_into(self, at: slice, state_MwC: Tensor, read_MtC: Tensor) -> None:
        window_MLC = torch.cat((state_MwC.float(), self.mixed_ntC[at]), 1)
        read_MtC.copy_(self.convolution(window_MLC))
        for state_wC, window_LC, length in zip(state_MwC, window_MLC, self.lengths[at], strict=True):
            state_wC.copy_(window_LC[length : length + len(state_wC)])

    def transition_into(self, at: slice, transition_1: Tensor) -> None:
        transition_1.add_(sum(self.lengths[at]))


class GatedShortConvolution(RecurrentMixer[ShortConv]):
    """The mixer of LFM2."""

    chunks_a_block = CHUNKS_A_BLOCK

    def __init__(self, shape: ShortConv, weights: Weights) -> None:
        self.shape = shape
        self.in_proj, self.out_proj = weights.linear("in_proj"), weights.linear("out_proj")
        taps, bias_C = weights.vector("conv1d.weight"), weights.optional("conv1d.bias")
        self.inputs_convolution = ShortConvolution(taps, bias_C, activated=False)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        """Compute B · x, all that the state depends on, and C."""
        b_NC, c_NC, x_NC = self.in_proj(x_ND, batch.n_prefill).chunk(3, -1)
        return b_NC * x_NC, c_NC

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return products[:1]

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Gates are 1 for each token, so that a chunk's sum is its length."""
        mixed_NC, c_NC = products
        return Rows(mixed_NC, torch.ones(len(mixed_NC), device=mixed_NC.device), c_NC)

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        return Chunks(mixed_ntC, gates_ntX.sum(1).long().tolist(), self.inputs_convolution)

    def identity(self) -> Tensor:
        return torch.zeros(self.shape.transition)

    def carried(self, transition_X: Tensor, state_X: Tensor) -> Tensor:
        """Return the inputs moved up by a number of tokens, followed by zeros."""
        by, moved_wC = min(int(transition_X), len(state_X)), torch.zeros_like(state_X)
        moved_wC[: len(state_X) - by] = state_X[by:]
        return moved_wC

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        window_BWC = torch.cat((state_BX.float(), mixed_BC.unsqueeze(1)), 1)
        state_BX.copy_(window_BWC[:, 1:])
        return self.inputs_convolution(window_BWC)[:, 0]

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        torch.mul(read_nX, rows.z_NX[at], out=rows.out_NX[at])

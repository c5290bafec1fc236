"""Decoding of Gated DeltaNet by a kernel. B decoding sequences, E outputs of the input projection, X heads · width."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels import gdn
from headwater.kernels.arrays import flat
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Memory, padded, taps_of
from headwater.mixers.gdn import GatedDeltaNet


class GatedDeltaNetKernel:
    """The kernel with the layer's weights."""

    def __init__(self, mixer: GatedDeltaNet) -> None:
        s = mixer.shape
        self.taps, self.norm = taps_of(mixer.convolution), padded(mixer.norm_V)
        self.gates = torch.cat((mixer.decay_H, mixer.dt_bias_H)).numpy()
        self.sizes = (s.k_heads, s.v_heads, s.k_dim, s.v_dim, mixer.convolution.before)
        self.eps = s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        (projected_BE,) = products
        gdn.decode_into(
            flat(out_BX), flat(projected_BE), batch.decode_slots,
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.gates, self.norm, self.sizes, self.eps,
        )  # fmt: skip

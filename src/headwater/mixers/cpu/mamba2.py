"""Decoding of Mamba-2 by a kernel. B decoding sequences, X heads · channels of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels import mamba2
from headwater.kernels.arrays import flat
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Memory, padded, taps_of
from headwater.mixers.mamba2 import StateSpaceDual


class StateSpaceDualKernel:
    """The kernel with the layer's weights."""

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

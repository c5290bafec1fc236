"""Gated DeltaNet by kernels. B decoding sequences, E outputs of the input projection, X heads · width, N rows."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels import delta_chunk, gdn
from headwater.kernels.arrays import flat
from headwater.kernels.vectors import LANES
from headwater.mixers.batch import Round, StepBatch
from headwater.mixers.cpu.memory import Memory, padded, taps_of
from headwater.mixers.cpu.ragged import ragged_of
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.panels import scratch


class GatedDeltaNetKernel:
    """The kernels with the layer's weights."""

    def __init__(self, mixer: GatedDeltaNet) -> None:
        s = mixer.shape
        self.taps, self.norm = taps_of(mixer.convolution), padded(mixer.norm_V)
        self.gates = torch.cat((mixer.decay_H, mixer.dt_bias_H)).numpy()
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
        assert projected.dtype == memory.stored.dtype  # inputs are kept as they are
        gdn.prefill_into(
            flat(out_NX), projected, ragged_of(together), len(together.slices),
            memory.states, memory.state_row, self.taps, memory.stored, memory.stored_row,
            self.gates, self.norm, self.sizes, self.eps, scratch(self._floats), self._floats,
        )  # fmt: skip

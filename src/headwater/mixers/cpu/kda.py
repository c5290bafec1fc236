"""Decoding of Kimi Delta Attention by a kernel. B decoding sequences, X heads · width."""

from __future__ import annotations

from torch import Tensor

from headwater.kernels import kda
from headwater.kernels.arrays import flat
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Memory, padded, taps_of
from headwater.mixers.kda import KimiDeltaAttention


class KimiDeltaAttentionKernel:
    """The kernel with the layer's weights."""

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

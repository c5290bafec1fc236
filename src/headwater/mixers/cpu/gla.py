"""Decoding of gated linear attention by a kernel. B decoding sequences, X heads · value width."""

from __future__ import annotations

from torch import Tensor

from headwater.kernels import gla
from headwater.kernels.arrays import flat
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Memory, padded
from headwater.mixers.gla import GatedLinearAttentionMixer


class GatedLinearAttentionKernel:
    """The kernel with the layer's weights."""

    def __init__(self, mixer: GatedLinearAttentionMixer) -> None:
        s = mixer.shape
        self.norm, self.sizes = padded(mixer.norm_V), (s.heads, s.k_dim, s.v_dim)
        self.normaliser, self.eps = float(s.normaliser), s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        rows = tuple(product.stride(0) for product in products)
        gla.decode_into(
            flat(out_BX), *map(flat, products), rows, *batch.decode_sequences,
            memory.states, memory.state_row, self.norm, self.sizes, self.normaliser, self.eps,
        )  # fmt: skip

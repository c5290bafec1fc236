"""Decode of latent attention on a CPU: the queries of all heads over one row a token, in pages of the arena.

A row's key is all of it, its value the latent at its beginning. B decoding sequences, H heads, L latent, X = L +
position channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.arrays import flat
from headwater.kernels.vectors import LANES
from headwater.layers.mla import LatentAttention
from headwater.mixers.attention import AttentionStep
from headwater.mixers.cpu.attention import AttentionStepOnCpu, Gates, HeadShape, KernelPages
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.weights import Weights


class LatentAttentionOnCpu(LatentAttentionMixer):
    """Latent attention whose decode runs in a kernel; prefill and the products of heads run in torch."""

    def __init__(self, layer: int, shape: LatentAttention, weights: Weights) -> None:
        super().__init__(layer, shape, weights)
        self.pages = KernelPages()

    def _read(self, q_BHX: Tensor, step: AttentionStep) -> Tensor:
        assert isinstance(step, AttentionStepOnCpu)
        heads, width = q_BHX.shape[1:]
        latent = self.shape.latent
        pages = self.pages.of(step.arena.pages_of(self.layer), step.arena.page_size)
        q_BHX = q_BHX.float() * self.shape.key_dim**-0.5
        read_BHL = torch.empty_like(q_BHX[..., :latent], dtype=step.dtype, memory_format=torch.contiguous_format)
        read = flat(read_BHL)
        shape = HeadShape(heads, 1, width, latent)
        step.rows.attend(flat(q_BHX), pages, Gates(read[:0]), read, heads * latent, shape)
        return read_BHL


def latent_attention_of(layer: int, shape: LatentAttention, weights: Weights) -> LatentAttentionMixer:
    """Build the layer: with kernels if latents and rows are whole vectors."""
    whole = shape.latent % LANES == 0 and shape.rope_dim % LANES == 0
    return (LatentAttentionOnCpu if whole else LatentAttentionMixer)(layer, shape, weights)

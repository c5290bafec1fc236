"""Heads' up-projections of keys and values, moved from what is cached to queries and outputs.

A head's key is U c for a latent c, so qᵀ(U c) = (Uᵀ q)ᵀ c; its value is W c, so Σ p W c = W Σ p c.

B decoding sequences, R = 8 rows of a tile, H heads, D channels of a head's key (of which `nope_dim` come from the
latent), V of its value, L latent, X = L + position channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headwater.layers.mla import LatentAttention

TILE = 8  # rows of every product: one height, whose rows depend neither on their place nor on each other


class AbsorbedHeads:
    """One product a head, of all sequences together."""

    def __init__(self, shape: LatentAttention, up_HEL: torch.Tensor) -> None:
        self.nope_dim = shape.nope_dim
        self.key_HDL = up_HEL[:, : shape.nope_dim].contiguous()
        self.value_HLV = up_HEL[:, shape.nope_dim :].mT.contiguous()

    def query(self, q_BHD: torch.Tensor) -> torch.Tensor:
        """What is held to rows of the arena: [B, H, X]."""
        return torch.cat([tiled(q_BHD[..., : self.nope_dim], self.key_HDL), q_BHD[..., self.nope_dim :]], dim=-1)

    def value(self, read_BHL: torch.Tensor) -> torch.Tensor:
        """The heads' outputs [B, H, V] of the latents that they read."""
        return tiled(read_BHL, self.value_HLV)


def tiled(x_BHK: torch.Tensor, weight_HKN: torch.Tensor) -> torch.Tensor:
    """Each head's product, [B, H, N], in tiles of a fixed height that are filled up with zeros."""
    n = x_BHK.shape[0]
    x_HBK = F.pad(x_BHK, (0, 0, 0, 0, 0, -n % TILE)).transpose(0, 1)
    tiles = [torch.bmm(x_HRK, weight_HKN) for x_HRK in x_HBK.split(TILE, dim=1)]
    return torch.cat(tiles, dim=1).transpose(0, 1)[:n]

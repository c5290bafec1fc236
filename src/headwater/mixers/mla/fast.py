"""Attention over latents: expanded keys and values for prefill, absorbed up-projections for decode.

Prefill expands the latents of a whole sequence to keys and values, some heads at a time. Decode keeps to latents: a
head's key is U c for a latent c, so qᵀ(U c) = (Uᵀ q)ᵀ c; its value is W c, so Σ p W c = W Σ p c.

N rows of a step, B decoding sequences, R = 8 rows of a tile, T queries of a slice, K keys (rounded up to 512), H heads,
G heads of a group, D channels of a head's key (`nope_dim` of them come from the latent), V of its value, L latent,
X = L + position channels, E = channels that come from the latent (of the key, then the value), M = max(D, V).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from headwater.layers.mla import LatentAttention
from headwater.mixers.attention import fast
from headwater.mixers.attention.fast import CausalMask
from headwater.mixers.batch import Slice
from headwater.mixers.weights import Weights

TILE = 8  # rows of every absorbed product: at one height, rows depend neither on their place nor on each other
GROUP = 4  # heads that are expanded together: 32,768 tokens take 100 MB in bfloat16, with Kimi-Linear's channels


class AbsorbedHeads:
    """Up-projections of keys and values, applied to queries and outputs: one product a head for all sequences."""

    def __init__(self, shape: LatentAttention, up_HEL: torch.Tensor) -> None:
        self.nope_dim = shape.nope_dim
        self.key_HDL = up_HEL[:, : shape.nope_dim].contiguous()
        self.value_HLV = up_HEL[:, shape.nope_dim :].mT.contiguous()

    def query(self, q_BHD: torch.Tensor) -> torch.Tensor:
        """Project queries to the latent space of rows in the arena: [B, H, X]."""
        return torch.cat([tiled(q_BHD[..., : self.nope_dim], self.key_HDL), q_BHD[..., self.nope_dim :]], dim=-1)

    def value(self, read_BHL: torch.Tensor) -> torch.Tensor:
        """Project the latents that heads read to the heads' outputs [B, H, V]."""
        return tiled(read_BHL, self.value_HLV)


def tiled(x_BHK: torch.Tensor, weight_HKN: torch.Tensor) -> torch.Tensor:
    """Compute each head's product, [B, H, N], in tiles of a fixed height that are padded with zeros."""
    n = x_BHK.shape[0]
    x_HBK = F.pad(x_BHK, (0, 0, 0, 0, 0, -n % TILE)).transpose(0, 1)
    tiles = [torch.bmm(x_HRK, weight_HKN) for x_HRK in x_HBK.split(TILE, dim=1)]
    return torch.cat(tiles, dim=1).transpose(0, 1)[:n]


def expanded_heads(shape: LatentAttention) -> tuple[int, int, int]:
    """Return KV heads of a group, query heads that share one, and the channels that attention computes with."""
    return min(GROUP, shape.heads), 1, max(shape.key_dim, shape.v_dim)


class ExpandedHeads:
    """The up-projection, a product for each group of heads. A row's bits do not depend on other rows."""

    def __init__(self, shape: LatentAttention, up_HEL: torch.Tensor, weights: Weights) -> None:
        self.shape = shape
        self.width = expanded_heads(shape)[2]
        self.groups = [weights.packed(up_GEL.flatten(0, 1)) for up_GEL in up_HEL.split(GROUP)]

    def prefill_into(
        self,
        out_NHV: torch.Tensor,
        q_NHD: torch.Tensor,
        row_KX: torch.Tensor,
        slices: Sequence[Slice],
        mask: CausalMask,
    ) -> None:
        """Compute attention of one sequence's slices over the rows of its tokens, up to the last slice's end."""
        latent_KL = row_KX[:, : self.shape.latent].contiguous()
        first = 0
        for up in self.groups:
            e_KGE = up(latent_KL, len(latent_KL)).unflatten(1, (-1, self.shape.nope_dim + self.shape.v_dim))
            heads = slice(first, first + e_KGE.shape[1])
            keys_values = self._keys_values(e_KGE, row_KX)
            for s in slices:
                rows = slice(s.first, s.first + s.length)
                self._read_into(out_NHV[rows, heads], q_NHD[rows, heads], keys_values, s.start, mask)
            first = heads.stop

    def _read_into(
        self,
        out_TGV: torch.Tensor,
        q_TGD: torch.Tensor,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        start: int,
        mask: CausalMask,
    ) -> None:
        q_TG1M = F.pad(q_TGD, (0, self.width - self.shape.key_dim)).unsqueeze(2)
        read_TG1M = torch.empty_like(q_TG1M)
        fast.prefill_into(read_TG1M, q_TG1M, keys_values, start, mask, self.shape.key_dim**-0.5)
        out_TGV.copy_(read_TG1M[:, :, 0, : self.shape.v_dim])

    def _keys_values(self, e_KGE: torch.Tensor, row_KX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [K, G, M] each, padded with zeros to M channels; valid until the next call."""
        shape = self.shape
        n_keys, n_heads, _ = e_KGE.shape
        widths = (shape.nope_dim, shape.rope_dim, shape.v_dim)
        k_KGM, v_KGM = _scratch(widths, e_KGE.dtype, e_KGE.device).of(n_keys, n_heads)
        k_KGM[..., : shape.nope_dim] = e_KGE[..., : shape.nope_dim]
        k_KGM[..., shape.nope_dim : shape.key_dim] = row_KX[:, None, shape.latent :]
        v_KGM[..., : shape.v_dim] = e_KGE[..., shape.nope_dim :]
        return k_KGM, v_KGM


class Scratch:
    """Memory for keys and values of a group, kept because fresh memory is slow; it grows with the longest sequence."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys_values = torch.zeros(2, 0, GROUP, width, dtype=dtype, device=device)

    def of(self, n_keys: int, n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [K, G, M]; channels that no layer writes are zeros, since all users write the same channels."""
        have = self._keys_values.shape[1]
        if have < n_keys:
            shape = (2, max(n_keys, 2 * have), *self._keys_values.shape[2:])
            self._keys_values = self._keys_values.new_zeros(shape)
        k_KGM, v_KGM = self._keys_values[:, :n_keys, :n_heads].unbind(0)
        return k_KGM, v_KGM


@cache
def _scratch(widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Scratch:
    """Return the scratch that layers of these widths (without position, with it, values) share, one after the other."""
    return Scratch(max(widths[0] + widths[1], widths[2]), dtype, device)

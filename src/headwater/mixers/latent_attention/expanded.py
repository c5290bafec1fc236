"""Keys and values of some heads, expanded from the latents of a whole sequence, and prefill over them.

T queries, K keys (rounded up to 512), H heads, G heads of a group, D channels of a key, V of a value, L latent,
X = L + position channels, E = channels that come from the latent (of the key, then the value), M = max(D, V).
"""

from __future__ import annotations

from functools import cache

import torch

from headwater.layers.latent_attention import LatentAttention
from headwater.mixers.attention import kernel
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.weights import Weights

GROUP = 4  # heads that are expanded together: 32,768 tokens take 100 MB in bfloat16, with channels as Kimi-Linear's


def expanded_heads(shape: LatentAttention) -> tuple[int, int, int]:
    """KV heads of a group, query heads that share one, and the channels that attention's kernel wants of both."""
    return min(GROUP, shape.heads), 1, max(shape.key_dim, shape.v_dim)


class ExpandedHeads:
    """The up-projection, a product for each group of heads. A row expands to the same bits in whatever company."""

    def __init__(self, shape: LatentAttention, up_HEL: torch.Tensor, weights: Weights) -> None:
        self.shape = shape
        self.width = expanded_heads(shape)[2]
        self.groups = [weights.packed(up_GEL.flatten(0, 1)) for up_GEL in up_HEL.split(GROUP)]

    def prefill_into(
        self, out_THV: torch.Tensor, q_THD: torch.Tensor, row_KX: torch.Tensor, start: int, step: AttentionStep
    ) -> None:
        """Attention of the queries at positions [start, start + T) over the rows of tokens [0, start + T)."""
        latent_KL = row_KX[:, : self.shape.latent].contiguous()
        q_TH1M = q_THD.new_zeros(*q_THD.shape[:2], 1, self.width)
        q_TH1M[:, :, 0, : self.shape.key_dim] = q_THD
        first = 0
        for up in self.groups:
            e_KGE = up(latent_KL, len(latent_KL)).unflatten(1, (-1, self.shape.nope_dim + self.shape.v_dim))
            heads = slice(first, first + e_KGE.shape[1])
            keys_values = self._keys_values(e_KGE, row_KX)
            read_TG1M = torch.empty_like(q_TH1M[:, heads])
            kernel.prefill_into(read_TG1M, q_TH1M[:, heads], keys_values, start, step, self.shape.key_dim**-0.5)
            out_THV[:, heads] = read_TG1M[:, :, 0, : self.shape.v_dim]
            first = heads.stop

    def _keys_values(self, e_KGE: torch.Tensor, row_KX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[K, G, M] each, zeros where they are wider than need be; valid until the next call."""
        shape = self.shape
        n_keys, n_heads, _ = e_KGE.shape
        widths = (shape.nope_dim, shape.rope_dim, shape.v_dim)
        k_KGM, v_KGM = _scratch(widths, e_KGE.dtype, e_KGE.device).of(n_keys, n_heads)
        k_KGM[..., : shape.nope_dim] = e_KGE[..., : shape.nope_dim]
        k_KGM[..., shape.nope_dim : shape.key_dim] = row_KX[:, None, shape.latent :]
        v_KGM[..., : shape.v_dim] = e_KGE[..., shape.nope_dim :]
        return k_KGM, v_KGM


class Scratch:
    """Memory for keys and values of a group, which grows with the longest sequence: fresh memory is slow to touch."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys_values = torch.zeros(2, 0, GROUP, width, dtype=dtype, device=device)

    def of(self, n_keys: int, n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros where nobody has written: all users write the same channels."""
        have = self._keys_values.shape[1]
        if have < n_keys:
            shape = (2, max(n_keys, 2 * have), *self._keys_values.shape[2:])
            self._keys_values = self._keys_values.new_zeros(shape)
        k_KGM, v_KGM = self._keys_values[:, :n_keys, :n_heads].unbind(0)
        return k_KGM, v_KGM


@cache
def _scratch(widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Scratch:
    """One for all layers of these widths (without position, with it, of values): they run one after the other."""
    return Scratch(max(widths[0] + widths[1], widths[2]), dtype, device)

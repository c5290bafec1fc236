"""Keys and values of some heads, expanded from the latents of a whole sequence, and prefill over them.

N rows of a step, T queries of a slice, K keys (rounded up to 512), H heads, G heads of a group, D channels of a key, V
of a value, L latent, X = L + position channels, E = channels that come from the latent (of the key, then the value),
M = max(D, V).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from headwater.layers.mla import LatentAttention
from headwater.mixers.attention import kernel
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.batch import Slice
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
        self,
        out_NHV: torch.Tensor,
        q_NHD: torch.Tensor,
        row_KX: torch.Tensor,
        slices: Sequence[Slice],
        step: AttentionStep,
    ) -> None:
        """Attention of one sequence's slices over the rows of its tokens, up to the last slice's end."""
        latent_KL = row_KX[:, : self.shape.latent].contiguous()
        first = 0
        for up in self.groups:
            e_KGE = up(latent_KL, len(latent_KL)).unflatten(1, (-1, self.shape.nope_dim + self.shape.v_dim))
            heads = slice(first, first + e_KGE.shape[1])
            keys_values = self._keys_values(e_KGE, row_KX)
            for s in slices:
                rows = slice(s.first, s.first + s.length)
                self._read_into(out_NHV[rows, heads], q_NHD[rows, heads], keys_values, s.start, step)
            first = heads.stop

    def _read_into(
        self,
        out_TGV: torch.Tensor,
        q_TGD: torch.Tensor,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        start: int,
        step: AttentionStep,
    ) -> None:
        q_TG1M = F.pad(q_TGD, (0, self.width - self.shape.key_dim)).unsqueeze(2)
        read_TG1M = torch.empty_like(q_TG1M)
        kernel.prefill_into(read_TG1M, q_TG1M, keys_values, start, step, self.shape.key_dim**-0.5)
        out_TGV.copy_(read_TG1M[:, :, 0, : self.shape.v_dim])

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

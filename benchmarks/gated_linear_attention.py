"""Gated linear attention: S' = Diag(e^g) S + k vᵀ, o = S'ᵀ q (Yang et al. 2023, section 3), of which HYPIC has figures.

No family of the package has this layer, so it stands here, and is added to the table of mixers. With G the running sums
of g within the chunk, and P[i, j] = Σ_K q_i k_j e^(g_{j+1} + … + g_i) for j ≤ i, else 0:

    O  = (e^G ∘ Q) S + P V
    S' = Diag(e^(G_64)) S + (e^(G_64 − G) ∘ K)ᵀ V

A chunk is padded with k = 0 and g = 0, which leaves S as it is.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, B decoding sequences, H heads, K key width,
V value width, C channels of queries, keys and values, D model width; M = n·H: chunks and heads as one batch. Chunks and
states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwater.layers.layer import Layer, Shapes
from headwater.mixers.activations import gated_rms_norm_into, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.kda import seen
from headwater.mixers.recurrent import RecurrentMixer, Rows, queries_keys_values, rank_one_step
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache


@dataclass(frozen=True, slots=True)
class GatedLinearAttention(Layer):
    """Linear attention with a decay for each key channel (Yang et al. 2023): decay (1), rank-one update and S^T q (2).

    A decay's logarithm is log sigmoid of two projections with few channels between them, divided by `normaliser`. The
    read values are normed head by head and gated by a silu. Tensors have flash-linear-attention's names, but for the
    norm.
    """

    kind: ClassVar[str] = "gated_linear_attention"
    kept: ClassVar[frozenset[str]] = frozenset({"gk_proj.0", "gk_proj.1"})
    heads: int
    k_dim: int
    v_dim: int
    gate_rank: int = 16
    normaliser: float = 16.0
    norm_eps: float = 1e-5

    def tensors(self) -> Shapes:
        keys, values = self.heads * self.k_dim, self.heads * self.v_dim
        outputs = {"q": keys, "k": keys, "v": values, "g": values}
        shapes: Shapes = {f"{name}_proj.weight": (n, self.hidden) for name, n in outputs.items()}
        return shapes | {
            "gk_proj.0.weight": (self.gate_rank, self.hidden),
            "gk_proj.1.weight": (keys, self.gate_rank),
            "gk_proj.1.bias": (keys,),
            "g_norm.weight": (self.v_dim,),
            "o_proj.weight": (self.hidden, values),
        }

    @property
    def tail_elements(self) -> int:
        return self.heads * (3 * self.k_dim + self.v_dim)

    @property
    def token_flops(self) -> int:
        return 5 * self.heads * self.k_dim * self.v_dim

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("recurrent", (self.heads, self.k_dim, self.v_dim)),)

    @property
    def draft_elements(self) -> int:
        return self.heads * (3 * self.k_dim + 2 * self.v_dim)

    @property
    def transition(self) -> tuple[int, ...]:
        """Diagonal: a factor for each key channel."""
        return (self.heads, self.k_dim)


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    read_MtK: Tensor  # e^G q
    within_MtV: Tensor  # P V
    write_MtK: Tensor  # e^(G_64 − G) k
    value_MtV: Tensor
    decay_MK1: Tensor  # e^(G_64)

    def advance_into(self, at: slice, state_MKV: Tensor, out_MtV: Tensor) -> None:
        torch.baddbmm(self.within_MtV[at], self.read_MtK[at], state_MKV, out=out_MtV)
        state_MKV.mul_(self.decay_MK1[at]).baddbmm_(self.write_MtK[at].mT, self.value_MtV[at])

    def transition_into(self, at: slice, transition_HK: Tensor) -> None:
        transition_HK.mul_(self.decay_MK1[at].squeeze(-1))


def prepare(qk_nt2HK: Tensor, v_ntHV: Tensor, g_ntHK: Tensor) -> Chunks:
    """Scale queries, and do all work on n chunks that needs no state."""
    width = qk_nt2HK.shape[-1]
    q_nHtK, k_nHtK = qk_nt2HK.permute(2, 0, 3, 1, 4)
    q_MtK = (q_nHtK * width**-0.5).reshape(-1, CHUNK, width)
    k_MtK = k_nHtK.reshape(-1, CHUNK, width)
    value_MtV = v_ntHV.transpose(1, 2).reshape(-1, CHUNK, v_ntHV.shape[-1])
    (attend_Mtt,), from_start_MtK, to_end_MtK = seen(q_MtK.unsqueeze(1), k_MtK, g_ntHK.transpose(1, 2))
    attend_Mtt.diagonal(dim1=1, dim2=2).copy_((q_MtK * k_MtK).sum(-1))
    return Chunks(
        within_MtV=torch.bmm(attend_Mtt, value_MtV),
        value_MtV=value_MtV,
        decay_MK1=from_start_MtK[:, -1].unsqueeze(-1).clone(),
        read_MtK=from_start_MtK.mul_(q_MtK),
        write_MtK=to_end_MtK.mul_(k_MtK),
    )


def decode_step(qk_B2HK: Tensor, v_BHV: Tensor, g_BHK: Tensor, state_BHKV: Tensor) -> Tensor:
    """Process one token of each of B sequences: return outputs [B, H, V]; update states (of any stride) in place."""
    q_BHK, k_BHK = qk_B2HK.unbind(1)
    return rank_one_step(q_BHK * q_BHK.shape[-1] ** -0.5, k_BHK, v_BHV, g_BHK.exp().unsqueeze(-1), state_BHKV)


class GatedLinearAttentionMixer(RecurrentMixer[GatedLinearAttention]):
    """Gated linear attention as in flash-linear-attention, without its optional convolutions."""

    def __init__(self, shape: GatedLinearAttention, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = weights.linear("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
        self.gate_proj = weights.linear("gk_proj.1")
        self.out_proj = weights.linear("o_proj")
        self.norm_V = weights.vector("g_norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        """Compute [q | k | v], inputs of the output's gate, and those of the decays."""
        s = self.shape
        keys, values = s.heads * s.k_dim, s.heads * s.v_dim
        projected_NE = self.in_proj(x_ND, batch.n_prefill)
        mixed_NC, z_NX, low_NR = projected_NE.split((2 * keys + values, values, s.gate_rank), -1)
        return mixed_NC, z_NX, self.gate_proj(low_NR, batch.n_prefill)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return products[::2]

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Compute gates [N, H, K]: the log decays, log sigmoid(gk) / normaliser."""
        s = self.shape
        mixed_NC, z_NX, gate_NX = products
        g_NX = softplus(-gate_NX.float()).div_(-s.normaliser)
        return Rows(mixed_NC, g_NX.unflatten(-1, (s.heads, s.k_dim)), z_NX.unflatten(-1, (s.heads, s.v_dim)))

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        return prepare(*self._heads(mixed_ntC), gates_ntX)

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        return decode_step(*self._heads(mixed_BC), gates_BX, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        gated_rms_norm_into(rows.out_NX[at], read_nX, rows.z_NX[at], self.norm_V, self.shape.norm_eps)

    def _heads(self, mixed_XC: Tensor) -> tuple[Tensor, Tensor]:
        return queries_keys_values(mixed_XC, self.shape.heads, self.shape.k_dim, self.shape.v_dim)


RECURRENT[GatedLinearAttention] = GatedLinearAttentionMixer

"""Gated linear attention: S' = Diag(e^g) S + k vᵀ, o = S'ᵀ q (Yang et al. 2023, section 3).

With G the running sums of g within the chunk, and P[i, j] = Σ_K q_i k_j e^(g_{j+1} + … + g_i) for j ≤ i, else 0:

    O  = (e^G ∘ Q) S + P V
    S' = Diag(e^(G_64)) S + (e^(G_64 − G) ∘ K)ᵀ V

A chunk is padded with k = 0 and g = 0, which leaves S as it is.

Decays between tokens (`seen`): with g the logarithm of the decays, token i sees token j through e^(g_{j+1} + … + g_i),
channel by channel. That is a factor of i times a factor of j for any point between them; for a pair on one side of the
point one of the two factors overflows. So pairs are split by halves: if a stretch of tokens is cut in the middle, every
token of its second half sees every token of its first half through the cut, which makes one product of matrices.
Stretches of 2, 4, …, 64 tokens cover all pairs. Sums of g are only ever added to, never subtracted from each other: no
sum is above 0, and a strong decay leaves no error in the weak ones after it.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, h tokens of a half, X kinds of rows (queries,
keys), B decoding sequences, H heads, K key width, V value width, C channels of queries, keys and values, D model width;
M = n·H: chunks and heads as one batch; m = M · cuts. Chunks and states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.layers.gla import GatedLinearAttention
from headwater.mixers.activations import LOG2_E, empty_vectors, exp2_, gated_rms_norm_into, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.recurrent import RecurrentMixer, Rows, queries_keys_values, rank_one_step
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache


def decayed_by_channel(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THK: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).
    Gated Linear Attention (Yang et al. 2023), equation 3, with g the logarithm of its decay α: each key channel of the
    state (or with g [T, H, 1], each head) forgets at its own rate, and k vᵀ is added. Queries come scaled.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        state_HKV *= g_THK[t].exp().unsqueeze(-1)
        state_HKV += k_THK[t].unsqueeze(-1) * v_THV[t].unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV


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


class Seen(NamedTuple):
    """Σ_K x_i k_j e^(g_{j+1} + … + g_i) for j < i, zeros elsewhere; and decays from and to the ends of chunks."""

    pairs_XMtt: Tensor  # contiguous for each kind
    from_start_MtK: Tensor  # e^(g_1 + … + g_i)
    to_end_MtK: Tensor  # e^(g_{i+1} + … + g_64)


def seen(x_MXtK: Tensor, k_MtK: Tensor, g_nHtK: Tensor) -> Seen:
    """Compute what tokens of a chunk see of each other if every key channel decays at its own rate.

    M = n · H; `g_nHtK` may be strided.
    """
    n, kinds, _, width = x_MXtK.shape
    pairs_XMtt = x_MXtK.new_zeros(kinds, n, CHUNK, CHUNK)
    sums_2MtK, sum_vectors = empty_vectors(2, n, CHUNK, width, device=x_MXtK.device)
    factor_2mhK, factor_vectors = empty_vectors(2, n, CHUNK // 2, width, device=x_MXtK.device)
    left_mXhK, right_mhK = (
        torch.empty_like(t[..., : CHUNK // 2, :], memory_format=torch.contiguous_format) for t in (x_MXtK, k_MtK)
    )
    after_MtK, before_MtK = sums_2MtK  # sums of g within the half: after a token, and up to it
    after_MtK.zero_()
    torch.mul(g_nHtK, LOG2_E, out=before_MtK.view(g_nHtK.shape))
    half = 1
    while half < CHUNK:
        cuts = (n, CHUNK // (2 * half))
        sums = sums_2MtK.view(2, *cuts, 2, half, width)
        factor = factor_2mhK.view(2, *cuts, half, width)
        factor.copy_(sums.diagonal(dim1=0, dim2=3).movedim(-1, 0))  # first halves to the cut, second halves from it
        exp2_(factor_vectors)
        left, right = left_mXhK.view(*cuts, kinds, half, width), right_mhK.view(*cuts, half, width)
        torch.mul(k_MtK.view(*cuts, 2, half, width)[:, :, 0], factor[0], out=right)
        x = x_MXtK.view(n, kinds, cuts[1], 2, half, width)
        torch.mul(x[:, :, :, 1].transpose(1, 2), factor[1].unsqueeze(2), out=left)
        dots_mRh = _dots(left.view(-1, kinds * half, width), right.view(-1, half, width))
        _across(pairs_XMtt, half).copy_(dots_mRh.view(*cuts, kinds, half, half))
        after, before = sums
        after[:, :, 0] += before[:, :, 1, -1:]
        before[:, :, 1] += before[:, :, 0, -1:]
        half *= 2
    exp2_(sum_vectors)
    return Seen(pairs_XMtt, before_MtK, after_MtK)


def _dots(left_mRK: Tensor, right_mhK: Tensor) -> Tensor:
    """Multiply left by right, [m, R, h]; a batched product of one column would run another kernel."""
    if right_mhK.shape[1] == 1:
        return (left_mRK * right_mhK).sum(-1, keepdim=True)
    return torch.bmm(left_mRK, right_mhK.mT)


def _across(pairs_XMtt: Tensor, half: int) -> Tensor:
    """Return a view of the pairs across all cuts between halves of that length, [M, cuts, X, h, h]."""
    kinds, n = pairs_XMtt.shape[:2]
    n_cuts = CHUNK // (2 * half)
    across = pairs_XMtt.view(kinds, n, n_cuts, 2, half, n_cuts, 2, half)[:, :, :, 1, :, :, 0]
    return across.diagonal(dim1=2, dim2=4).permute(1, 4, 0, 2, 3)


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

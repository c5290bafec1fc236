"""Kimi Delta Attention: S' = Diag(e^g) S + k (β (v − (Diag(e^g) S)ᵀk))ᵀ, o = S'ᵀ q (Kimi Linear, 2025, equation 1).

As Gated DeltaNet (`gdn.py`), whose steps with a state these are; what differs is what tokens of a chunk see of each
other, D[i, j], and a state's decay: they are there for each key channel (section 3.2).

    A  = the part of β Σ_K k_i k_j D[i, j] below the diagonal
    E  = (I + A)⁻¹ (β V − (β e^G ∘ K) S)         G: running sums of g, [t, K]
    O  = (e^G ∘ Q) S + P E                       P = Σ_K q_i k_j D[i, j], not above the diagonal
    S' = Diag(e^(G_64)) S + (e^(G_64 − G) ∘ K)ᵀ E

A chunk is padded with β = 0 and g = 0, which leaves S as it is.

Decays between tokens (`seen`): with g the logarithm of the decays, token i sees token j through e^(g_{j+1} + … + g_i),
channel by channel. That is a factor of i times a factor of j for any point between them; for a pair on one side of the
point one of the two factors overflows. So pairs are split by halves: if a stretch of tokens is cut in the middle, every
token of its second half sees every token of its first half through the cut, which makes one product of matrices.
Stretches of 2, 4, …, 64 tokens cover all pairs. Sums of g are only ever added to, never subtracted from each other: no
sum is above 0, and a strong decay leaves no error in the weak ones after it.

N rows of a step, n chunks (of any sequences), t = 64 tokens, B decoding sequences, H heads, K width of their keys and V
of their values (equal), C convolved channels, D model width, h tokens of a half, X kinds of rows (queries, keys);
M = n·H, m = M · cuts. Chunks and states are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.layers.kda import DeltaAttention
from headwater.mixers.activations import LOG2_E, empty_vectors, exp2_, gated_rms_norm_into, sigmoid, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gdn import Chunks, DeltaRule, norm_scales
from headwater.mixers.recurrent import Rows, queries_keys_values
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache


def prepare(qk_nt2HK: Tensor, v_ntHV: Tensor, g_ntHK: Tensor, beta_ntH: Tensor) -> Chunks:
    """Normalise and scale queries and keys, and do all work on n chunks that needs no state."""
    n, _, _, n_heads, width = qk_nt2HK.shape
    beta_nHt1 = beta_ntH.transpose(1, 2).unsqueeze(-1).contiguous()
    q_nHtK, k_nHtK = (qk_nt2HK * norm_scales(qk_nt2HK)).permute(2, 0, 3, 1, 4)
    k_MtK = k_nHtK.reshape(-1, CHUNK, width)
    qk_nH2tK = k_MtK.new_empty(n, n_heads, 2, CHUNK, width)
    qk_nH2tK[:, :, 0] = q_nHtK
    torch.mul(k_nHtK, beta_nHt1, out=qk_nH2tK[:, :, 1])
    qk_M2tK = qk_nH2tK.flatten(0, 1)
    (attend_Mtt, system_Mtt), from_start_MtK, to_end_MtK = seen(qk_M2tK, k_MtK, g_ntHK.transpose(1, 2))
    attend_Mtt.diagonal(dim1=1, dim2=2).copy_((qk_M2tK[:, 0] * k_MtK).sum(-1))
    unit_tt = torch.eye(CHUNK, device=system_Mtt.device)
    value_nHtV = torch.empty_like(v_ntHV.transpose(1, 2), memory_format=torch.contiguous_format)
    torch.mul(v_ntHV.transpose(1, 2), beta_nHt1, out=value_nHtV)
    return Chunks(
        read_MRK=qk_M2tK.mul_(from_start_MtK.unsqueeze(1)).flatten(1, 2),
        value_MtV=value_nHtV.flatten(0, 1),
        inverse_Mtt=torch.linalg.solve_triangular(system_Mtt, unit_tt, upper=False, unitriangular=True),
        attend_Mtt=attend_Mtt,
        decay_MX1=from_start_MtK[:, -1].unsqueeze(-1),
        write_MtK=to_end_MtK.mul_(k_MtK),
    )


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


class KimiDeltaAttention(DeltaRule[DeltaAttention]):
    """The mixer of Kimi-Linear and of Ling 3.0."""

    def __init__(self, shape: DeltaAttention, weights: Weights) -> None:
        self.shape = shape
        between = ("f_a_proj", "g_a_proj") if shape.low_rank else ("f_proj", "g_proj")
        self.in_proj = weights.linear("q_proj", "k_proj", "v_proj", *between, "b_proj")
        if shape.low_rank:
            self.f_b_proj, self.g_b_proj = weights.linear("f_b_proj"), weights.linear("g_b_proj")
        self.out_proj = weights.linear("o_proj")
        taps = torch.cat([weights.stored(f"{name}_conv1d.weight") for name in "qkv"])
        self.convolution = ShortConvolution(taps.to(weights.device))
        self.rate_X = weights.vector("A_log").exp_().repeat_interleave(shape.head_dim)
        self.dt_bias_X = weights.vector("dt_bias")
        self.norm_V = weights.vector("o_norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        """Compute [q | k | v], inputs of the decays and of the output's gate, and those of the writing strengths."""
        s = self.shape
        between = s.head_dim if s.low_rank else s.width
        widths = (3 * s.width, between, between, s.heads)
        mixed_NC, f_NX, z_NX, b_NH = self.in_proj(x_ND, batch.n_prefill).split(widths, -1)
        if s.low_rank:
            f_NX, z_NX = self.f_b_proj(f_NX, batch.n_prefill), self.g_b_proj(z_NX, batch.n_prefill)
        return mixed_NC, f_NX, z_NX, b_NH

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mixed_NC, f_NX, _, b_NH = products
        return mixed_NC, f_NX, b_NH

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Compute gates [N, H · K + H]: the log decays, then the writing strength, sigmoid(b)."""
        s = self.shape
        mixed_NC, f_NX, z_NX, b_NH = products
        gates_NX = torch.empty(len(mixed_NC), s.width + s.heads, device=mixed_NC.device)
        self._log_decays_into(f_NX.float() + self.dt_bias_X, gates_NX[:, : s.width])
        gates_NX[:, s.width :] = sigmoid(b_NH.float())
        return Rows(mixed_NC, gates_NX, z_NX.unflatten(-1, (s.heads, s.head_dim)))

    def _log_decays_into(self, f_NX: Tensor, out_NX: Tensor) -> None:
        """Write −e^A softplus(f), or with a lower bound, bound · sigmoid(e^A f). `f_NX` is overwritten."""
        if self.shape.lowest is None:
            torch.mul(softplus(f_NX), self.rate_X, out=out_NX).neg_()
        else:
            torch.mul(sigmoid(f_NX.mul_(self.rate_X)), self.shape.lowest, out=out_NX)

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        return prepare(*self.heads(mixed_ntC), *self.gates(gates_ntX))

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        gated_rms_norm_into(rows.out_NX[at], read_nX, rows.z_NX[at], self.norm_V, self.shape.norm_eps, sigmoid)

    def heads(self, mixed_XC: Tensor) -> tuple[Tensor, Tensor]:
        return queries_keys_values(mixed_XC, self.shape.heads, self.shape.head_dim, self.shape.head_dim)

    def gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = gates.split((self.shape.width, self.shape.heads), -1)
        return g.unflatten(-1, (self.shape.heads, self.shape.head_dim)), beta

"""Gated linear attention in chunks of 64 tokens (prefill) and one token at a time for many sequences (decode).

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

n chunks (of any sequences), t = 64 tokens, h tokens of a half, X kinds of rows (queries, keys), H heads, K key width,
V value width, B sequences; M = n·H: chunks and heads as one batch; m = M · cuts. All float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headwater.mixers.activations import LOG2_E, empty_vectors, exp2_
from headwater.mixers.batch import CHUNK
from headwater.mixers.recurrent import scratch


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    read_MtK: torch.Tensor  # e^G q
    within_MtV: torch.Tensor  # P V
    write_MtK: torch.Tensor  # e^(G_64 − G) k
    value_MtV: torch.Tensor
    decay_MK1: torch.Tensor  # e^(G_64)


def prepare(qk_nt2HK: torch.Tensor, v_ntHV: torch.Tensor, g_ntHK: torch.Tensor) -> Chunks:
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


def advance_into(chunks: Chunks, at: slice, state_MKV: torch.Tensor, out_MtV: torch.Tensor) -> None:
    """Advance several sequences by one chunk each: update their states in place, write their outputs to `out_MtV`.

    `at` are the chunks' rows in `chunks` (a run of M = sequences × heads).
    """
    torch.baddbmm(chunks.within_MtV[at], chunks.read_MtK[at], state_MKV, out=out_MtV)
    state_MKV.mul_(chunks.decay_MK1[at]).baddbmm_(chunks.write_MtK[at].mT, chunks.value_MtV[at])


def decode_step(
    qk_B2HK: torch.Tensor, v_BHV: torch.Tensor, g_BHK: torch.Tensor, state_BHKV: torch.Tensor
) -> torch.Tensor:
    """Process one token of each of B sequences: return outputs [B, H, V]; update states (of any stride) in place.

    q reads the decayed state in a product of two rows (a single row is another kernel, whose bits depend on the batch);
    then S' = e^g S + k vᵀ gives o = S'ᵀ q = e^g Sᵀ q + (k·q) v.
    """
    width = qk_B2HK.shape[-1]
    q_BHK, k_BHK = qk_B2HK[:, 0] * width**-0.5, qk_B2HK[:, 1]
    # The decayed states are contiguous, as one batch of all heads must be.
    decayed_BHKV = torch.mul(state_BHKV, g_BHK.exp().unsqueeze(-1), out=scratch(state_BHKV))
    q_M2K = q_BHK.reshape(-1, 1, width).repeat(1, 2, 1)
    read_BHV = torch.bmm(q_M2K, decayed_BHKV.flatten(0, 1))[:, 0].view(v_BHV.shape)
    torch.addcmul(decayed_BHKV, k_BHK.unsqueeze(-1), v_BHV.unsqueeze(-2), out=state_BHKV)
    return torch.addcmul(read_BHV, (q_BHK * k_BHK).sum(-1, keepdim=True), v_BHV)


class Seen(NamedTuple):
    """Σ_K x_i k_j e^(g_{j+1} + … + g_i) for j < i, zeros elsewhere; and decays from and to the ends of chunks."""

    pairs_XMtt: torch.Tensor  # contiguous for each kind
    from_start_MtK: torch.Tensor  # e^(g_1 + … + g_i)
    to_end_MtK: torch.Tensor  # e^(g_{i+1} + … + g_64)


def seen(x_MXtK: torch.Tensor, k_MtK: torch.Tensor, g_nHtK: torch.Tensor) -> Seen:
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


def _dots(left_mRK: torch.Tensor, right_mhK: torch.Tensor) -> torch.Tensor:
    """Multiply left by right, [m, R, h]; a batched product of one column would run another kernel."""
    if right_mhK.shape[1] == 1:
        return (left_mRK * right_mhK).sum(-1, keepdim=True)
    return torch.bmm(left_mRK, right_mhK.mT)


def _across(pairs_XMtt: torch.Tensor, half: int) -> torch.Tensor:
    """Return a view of the pairs across all cuts between halves of that length, [M, cuts, X, h, h]."""
    kinds, n = pairs_XMtt.shape[:2]
    n_cuts = CHUNK // (2 * half)
    across = pairs_XMtt.view(kinds, n, n_cuts, 2, half, n_cuts, 2, half)[:, :, :, 1, :, :, 0]
    return across.diagonal(dim1=2, dim2=4).permute(1, 4, 0, 2, 3)

"""Gated linear attention in chunks of 64 tokens (prefill) and one token at a time for many sequences (decode).

With G the running sums of g within the chunk, and P[i, j] = Σ_K q_i k_j e^(g_{j+1} + … + g_i) where j ≤ i, else 0:

    O  = (e^G ∘ Q) S + P V
    S' = Diag(e^(G_64)) S + (e^(G_64 − G) ∘ K)ᵀ V

A chunk is padded with k = 0 and g = 0, which leaves S as it is.

n chunks (of any sequences), t = 64 tokens, H heads, K key width, V value width, B sequences; M = n·H: chunks and heads
as one batch. All float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.channel_decay import seen
from headwater.mixers.chunks import CHUNK
from headwater.mixers.scratch import scratch


@dataclass(frozen=True)
class Chunks:
    """What chunks contribute, whatever the state before them."""

    read_MtK: torch.Tensor  # e^G q
    within_MtV: torch.Tensor  # P V
    write_MtK: torch.Tensor  # e^(G_64 − G) k
    value_MtV: torch.Tensor
    decay_MK1: torch.Tensor  # e^(G_64)


def prepare(qk_nt2HK: torch.Tensor, v_ntHV: torch.Tensor, g_ntHK: torch.Tensor) -> Chunks:
    """Scale queries, and do all the work on n chunks that needs no state."""
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
    """One chunk of each of several sequences: their states are moved on in place, their outputs go to `out_MtV`.

    `at` are the chunks' rows in `chunks` (a run of M = sequences × heads).
    """
    torch.baddbmm(chunks.within_MtV[at], chunks.read_MtK[at], state_MKV, out=out_MtV)
    state_MKV.mul_(chunks.decay_MK1[at]).baddbmm_(chunks.write_MtK[at].mT, chunks.value_MtV[at])


def decode_step(
    qk_B2HK: torch.Tensor, v_BHV: torch.Tensor, g_BHK: torch.Tensor, state_BHKV: torch.Tensor
) -> torch.Tensor:
    """One token of each of B sequences: outputs [B, H, V]; the states (strided by sequence at will) change in place.

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

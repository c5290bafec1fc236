"""Linear attention with fixed decays, in chunks of 64 tokens (prefill) and one token of many sequences (decode).

With λ a head's decay, D[i, j] = λ^(i − j) on and below the diagonal, and L the tokens of a chunk (64 but for a last
one), which stand first in it:

    O  = λ^(i + 1) Q S + (Q Kᵀ ∘ D) V
    S' = λ^L S + (λ^(L − 1 − i) K)ᵀ V

As decays are the layer's own, all powers are made once, in float64; none is above 1. Rows that fill up a chunk have
zero keys and values, and are not among its L: S stays as it is.

n chunks (of any sequences), t = 64 tokens, H heads, K width of keys and values, B sequences, P powers of a decay,
M = B·H. All float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.batch import CHUNK
from headwater.mixers.recurrent import scratch


@dataclass(frozen=True)
class Decays:
    """Powers of the decays of a layer's heads."""

    power_PH: torch.Tensor  # λ^p, p = 0 … 64
    attend_Htt: torch.Tensor  # scale · D
    read_Ht1: torch.Tensor  # scale · λ^(i + 1)
    scale: float  # of a query times a key

    @classmethod
    def of(cls, slope_H: torch.Tensor, scale: float) -> Decays:
        """Compute the powers; `slope_H` is −log λ, at least 0."""
        position_t = torch.arange(CHUNK, dtype=torch.float64, device=slope_H.device)
        distance_tt = position_t[:, None] - position_t
        slope_H11 = slope_H.double()[:, None, None]
        attend_Htt = (-slope_H11 * distance_tt.clamp_min(0)).exp().masked_fill(distance_tt < 0, 0)
        exponent_P1 = torch.arange(CHUNK + 1, dtype=torch.float64, device=slope_H.device)[:, None]
        power_PH = (-slope_H.double() * exponent_P1).exp()
        read_Ht1 = power_PH[1:].T.unsqueeze(-1)
        return cls(power_PH.float(), (scale * attend_Htt).float(), (scale * read_Ht1).float().contiguous(), scale)


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    q_nHtK: torch.Tensor
    attend_nHtt: torch.Tensor  # Q Kᵀ ∘ D, zero above the diagonal
    write_nHtK: torch.Tensor  # λ^(L − 1 − i) k
    v_nHtK: torch.Tensor
    decay_nH: torch.Tensor  # λ^L


def prepare(qkv_nt3HK: torch.Tensor, length_n: torch.Tensor, decays: Decays) -> Chunks:
    """Do all work on n chunks that needs no state; `length_n` are the tokens of each chunk, int64."""
    q_nHtK, k_nHtK, v_nHtK = qkv_nt3HK.permute(2, 0, 3, 1, 4)
    attend_nHtt = q_nHtK.new_empty(*q_nHtK.shape[:3], CHUNK)
    for attend_Htt, q_HtK, k_HtK in zip(attend_nHtt, q_nHtK, k_nHtK, strict=True):
        torch.bmm(q_HtK, k_HtK.mT, out=attend_Htt)
    attend_nHtt.mul_(decays.attend_Htt)
    to_end_nt = (length_n[:, None] - 1 - torch.arange(CHUNK, device=length_n.device)).clamp_min_(0)
    to_end_nHt = decays.power_PH[to_end_nt].transpose(1, 2)
    write_nHtK = torch.empty_like(k_nHtK, memory_format=torch.contiguous_format)
    torch.mul(k_nHtK, to_end_nHt.unsqueeze(-1), out=write_nHtK)
    return Chunks(q_nHtK, attend_nHtt, write_nHtK, v_nHtK, decays.power_PH[length_n])


def advance_into(chunks: Chunks, at: int, decays: Decays, state_HKK: torch.Tensor, read_HtK: torch.Tensor) -> None:
    """Advance one sequence by the chunk at index `at`: update its state in place, write its outputs to `read_HtK`.

    Queries and values are read from the projection's output: a copy that makes one batch of several sequences costs
    more than it saves.
    """
    v_HtK = chunks.v_nHtK[at]
    torch.bmm(chunks.q_nHtK[at], state_HKK, out=read_HtK)
    read_HtK.mul_(decays.read_Ht1).baddbmm_(chunks.attend_nHtt[at], v_HtK)
    state_HKK.mul_(chunks.decay_nH[at, :, None, None]).baddbmm_(chunks.write_nHtK[at].mT, v_HtK)


def decode_step(qkv_B3HK: torch.Tensor, decays: Decays, state_BHKK: torch.Tensor) -> torch.Tensor:
    """Process one token of each of B sequences: return outputs [B, H, K]; update states (of any stride) in place.

    q reads the decayed state in a product of two rows (a single row is another kernel, whose bits depend on the batch);
    then S' = λS + k vᵀ gives o = S'ᵀ q = λ Sᵀ q + (k·q) v.
    """
    q_BHK, k_BHK, v_BHK = qkv_B3HK.unbind(1)
    n, n_heads, width = q_BHK.shape
    q_BHK = q_BHK * decays.scale
    # The decayed states are contiguous, as one batch of all heads must be.
    decayed_BHKK = torch.mul(state_BHKK, decays.power_PH[1, :, None, None], out=scratch(state_BHKK))
    q_M2K = q_BHK.reshape(-1, 1, width).repeat(1, 2, 1)
    read_BHK = torch.bmm(q_M2K, decayed_BHKK.view(-1, width, width))[:, 0].view(n, n_heads, width)
    torch.addcmul(decayed_BHKK, k_BHK.unsqueeze(-1), v_BHK.unsqueeze(-2), out=state_BHKK)
    return torch.addcmul(read_BHK, (q_BHK * k_BHK).sum(-1, keepdim=True), v_BHK)

"""Mamba-2 in chunks of 64 tokens (prefill) and one token at a time for many sequences (decode).

Within a chunk the recurrence is attention without a softmax (the dual form; Dao and Gu, 2024, section 6). With G the
running sum of dt·a and D[i, j] = e^(G_i − G_j) dt_j on and below the diagonal, zero above it:

    Y  = e^G C S + (C Bᵀ ∘ D) X + d X
    S' = e^(G_64) S + (e^(G_64 − G) dt X)ᵀ B        (S as [N, P]: its transpose)

Work that does not need S is done for several chunks at once; the rest is two batched products a chunk. No exponent is
above 0, so no decay overflows. A chunk is padded with dt = 0, which leaves S as it is.

The exponents are differences of sums, small ones of large sums where tokens forget much. So a sum is kept in two parts:
multiples of 2^-GRID_BITS, whose differences are exact in float32, and what is left. A decay below
2^-FORGOTTEN counts as 2^-FORGOTTEN: either is 0 in float32.

n chunks (of any sequences), t = 64 tokens, H heads, G groups of heads that share B and C, P channels a head, N state
width, B sequences; M = n·H: chunks and heads as one batch. All float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from headwater.mixers.activations import LOG2_E, empty_vectors, exp2_
from headwater.mixers.batch import CHUNK
from headwater.mixers.recurrent import scratch

FORGOTTEN = 160.0  # binary digits
GRID_BITS = 24 - math.ceil(math.log2(CHUNK * FORGOTTEN))  # of a fraction, so that sums over a chunk have 24 in all


@dataclass(frozen=True)
class Inputs:
    """Inputs of n chunks' tokens, with B and C once for each group of heads."""

    x_ntHP: torch.Tensor
    dt_ntH: torch.Tensor
    b_ntGN: torch.Tensor
    c_ntGN: torch.Tensor


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    read_MtN: torch.Tensor  # C of each head
    from_start_Mt1: torch.Tensor  # e^G
    local_MtP: torch.Tensor  # (C Bᵀ ∘ D) X + d X
    write_MNt: torch.Tensor  # Bᵀ of each head
    taken_MtP: torch.Tensor  # e^(G_64 − G) dt X
    decay_M11: torch.Tensor  # e^(G_64)


@cache
def _bound_above_diagonal(device: torch.device) -> torch.Tensor:
    """Return upper bounds of the exponents: −∞ above the diagonal, where they could overflow, else +∞."""
    above_tt = torch.ones(CHUNK, CHUNK, device=device).triu(1).bool()
    return torch.full((CHUNK, CHUNK), float("inf"), device=device).masked_fill(above_tt, float("-inf"))


def prepare(given: Inputs, a_H: torch.Tensor, skip_H: torch.Tensor) -> Chunks:
    """Do all work on n chunks that needs no state. `a_H` are the decay rates, below 0."""
    n, _, n_heads, _ = given.x_ntHP.shape
    grouped = (n, given.b_ntGN.shape[2], -1)
    dt_nHt = given.dt_ntH.transpose(1, 2)
    digits_nHt = (dt_nHt.double() * (LOG2_E * a_H.double().unsqueeze(-1))).clamp_min_(-FORGOTTEN)
    sum_nHt = digits_nHt.cumsum(-1)

    b_nGtN, c_nGtN = (t.transpose(1, 2).contiguous() for t in (given.b_ntGN, given.c_ntGN))
    dots_nG1tt = torch.bmm(c_nGtN.flatten(0, 1), b_nGtN.flatten(0, 1).mT).view(*grouped[:2], 1, CHUNK, CHUNK)
    weight_nHtt = _weights(sum_nHt, dt_nHt)
    attend_nHtt = weight_nHtt.view(*grouped, CHUNK, CHUNK).mul_(dots_nG1tt).view(weight_nHtt.shape)
    attend_nHtt.diagonal(dim1=-2, dim2=-1).add_(skip_H.unsqueeze(-1))
    x_MtP = given.x_ntHP.transpose(1, 2).flatten(0, 1)

    sums_nHt = sum_nHt.float()
    to_end_nHt = _power((sum_nHt[..., -1:] - sum_nHt).float()).mul_(dt_nHt)
    from_start_nHt = _power(sums_nHt)
    read_MtN, write_MtN = (_of_heads(t, n_heads) for t in (c_nGtN, b_nGtN))
    return Chunks(
        read_MtN=read_MtN,
        from_start_Mt1=from_start_nHt.view(-1, CHUNK, 1),
        local_MtP=torch.bmm(attend_nHtt.flatten(0, 1), x_MtP),
        write_MNt=write_MtN.mT,
        taken_MtP=x_MtP * to_end_nHt.view(-1, CHUNK, 1),
        decay_M11=from_start_nHt[..., -1].reshape(-1, 1, 1),
    )


def _weights(sum_nHt: torch.Tensor, dt_nHt: torch.Tensor) -> torch.Tensor:
    """Return D, from running sums of binary digits in float64: [n, H, t, t]."""
    coarse_nHt = (sum_nHt * 2**GRID_BITS).round_().mul_(2**-GRID_BITS)
    fine_nHt, coarse_nHt = (sum_nHt - coarse_nHt).float(), coarse_nHt.float()
    weight_nHtt: torch.Tensor = coarse_nHt.unsqueeze(-1) - coarse_nHt.unsqueeze(-2)
    weight_nHtt.add_(fine_nHt.unsqueeze(-1))
    torch.minimum(weight_nHtt, _bound_above_diagonal(dt_nHt.device), out=weight_nHtt)
    exp2_(weight_nHtt.view(-1))
    return weight_nHtt.mul_(_power(-fine_nHt).mul_(dt_nHt).unsqueeze(-2))


def _power(digits_nHt: torch.Tensor) -> torch.Tensor:
    """Return 2^x in new memory."""
    out_nHt, vectors = empty_vectors(*digits_nHt.shape, device=digits_nHt.device)
    out_nHt.copy_(digits_nHt)
    exp2_(vectors)
    return out_nHt


def _of_heads(of_groups_nGtN: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Repeat B or C for each head, [n·H, t, N]; one chunk of one group is not copied."""
    n, n_groups, *rest = of_groups_nGtN.shape
    return of_groups_nGtN.unsqueeze(2).expand(n, n_groups, n_heads // n_groups, *rest).reshape(-1, *rest)


def advance_into(chunks: Chunks, at: slice, state_MNP: torch.Tensor, out_MtP: torch.Tensor) -> None:
    """Advance several sequences by one chunk each: update their states in place, write their outputs to `out_MtP`.

    `at` are the chunks' rows in `chunks` (a run of M = sequences × heads).
    """
    torch.bmm(chunks.read_MtN[at], state_MNP, out=out_MtP)
    torch.addcmul(chunks.local_MtP[at], out_MtP, chunks.from_start_Mt1[at], out=out_MtP)
    state_MNP.mul_(chunks.decay_M11[at]).baddbmm_(chunks.write_MNt[at], chunks.taken_MtP[at])


def transition_into(chunks: Chunks, at: slice, transition_M: torch.Tensor) -> None:
    """T ← e^(G_64) T in place: a factor for each head."""
    transition_M.mul_(chunks.decay_M11[at].flatten())


def decode_step(given: Inputs, a_H: torch.Tensor, skip_H: torch.Tensor, state_BHNP: torch.Tensor) -> torch.Tensor:
    """Process one token (t = 1) of each of B sequences: return outputs [B, H, P]; update states in place.

    C is read from the decayed state as two rows of one product (a single row is another kernel, whose bits depend on
    the batch); then S' = e^(dt a) S + (dt x) Bᵀ gives y = C S' = e^(dt a) C S + (C·B) dt x.
    """
    x_BHP, dt_BH, b_BGN, c_BGN = (t[:, 0] for t in (given.x_ntHP, given.dt_ntH, given.b_ntGN, given.c_ntGN))
    n_heads = x_BHP.shape[1]
    b_BHN, c_BHN = (t.repeat_interleave(n_heads // t.shape[1], 1) for t in (b_BGN, c_BGN))
    c_M2N = c_BHN.reshape(-1, 1, c_BHN.shape[-1]).repeat(1, 2, 1)  # expanded, each matrix would be a product of its own
    taken_BHP = dt_BH.unsqueeze(-1) * x_BHP
    # The decayed states are contiguous, as one batch of all heads must be.
    decayed_BHNP = torch.mul(state_BHNP, (dt_BH * a_H).exp_()[..., None, None], out=scratch(state_BHNP))
    read_BHP = torch.bmm(c_M2N, decayed_BHNP.flatten(0, 1))[:, 0].view(x_BHP.shape)
    torch.addcmul(decayed_BHNP, b_BHN.unsqueeze(-1), taken_BHP.unsqueeze(-2), out=state_BHNP)
    dot_BH1 = (b_BHN * c_BHN).sum(-1, keepdim=True)
    return torch.addcmul(read_BHP, dot_BH1, taken_BHP).addcmul_(skip_H.unsqueeze(-1), x_BHP)

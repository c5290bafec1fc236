"""Mamba-2: S' = a S + B (dt x)ᵀ, y = S'ᵀ C + D x, with one decay a head (Dao and Gu, 2024, section 6).

Within a chunk the recurrence is attention without a softmax (the dual form). With G the running sum of dt·a and
D[i, j] = e^(G_i − G_j) dt_j on and below the diagonal, zero above it:

    Y  = e^G C S + (C Bᵀ ∘ D) X + d X
    S' = e^(G_64) S + (e^(G_64 − G) dt X)ᵀ B        (S as [E, P]: its transpose)

Work that does not need S is done for several chunks at once; the rest is two batched products a chunk. No exponent is
above 0, so no decay overflows. A chunk is padded with dt = 0, which leaves S as it is.

The exponents are differences of sums, small ones of large sums where tokens forget much. So a sum is kept in two parts:
multiples of 2^-GRID_BITS, whose differences are exact in float32, and the rest. A decay below
2^-FORGOTTEN counts as 2^-FORGOTTEN: either is 0 in float32.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, B decoding sequences, H heads, G groups of heads
that share B and C, P channels a head, I = H·P, E state width, C convolved channels, D model width; M = n·H: chunks and
heads as one batch. Chunks and states are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headwater.layers.mamba2 import Mamba2
from headwater.mixers.activations import LOG2_E, empty_vectors, exp2_, inverse_rms, silu, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.recurrent import RecurrentMixer, Rows, decayed_by_channel, rank_one_step
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

FORGOTTEN = 160.0  # binary digits
GRID_BITS = 24 - math.ceil(math.log2(CHUNK * FORGOTTEN))  # of a fraction, so that sums over a chunk have 24 in all
HEADS_A_BLOCK = 48  # chunks × heads whose intermediates fit in cache


def state_space(
    x_THP: Tensor, dt_TH: Tensor, a_H: Tensor, b_TGE: Tensor, c_TGE: Tensor, skip_H: Tensor, state_HEP: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, H, P] and the state after the last token, in the dtype of the arguments (float64 works).
    Transformers are SSMs (Dao and Gu, 2024), equation 2 with A scalar: the state decays by e^(dt a), a < 0, takes up
    dt x along B, and is read along C; what D lets through is added.
    """
    shared = x_THP.shape[1] // b_TGE.shape[1]
    b_THE, c_THE = (t.repeat_interleave(shared, 1) for t in (b_TGE, c_TGE))
    taken_THP, log_decay_TH1 = dt_TH.unsqueeze(-1) * x_THP, (dt_TH * a_H).unsqueeze(-1)
    read_THP, state_HEP = decayed_by_channel(c_THE, b_THE, taken_THP, log_decay_TH1, state_HEP)
    return read_THP + skip_H.unsqueeze(-1) * x_THP, state_HEP


@dataclass(frozen=True)
class Inputs:
    """Inputs of n chunks' tokens, with B and C once for each group of heads."""

    x_ntHP: Tensor
    dt_ntH: Tensor
    b_ntGE: Tensor
    c_ntGE: Tensor


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    read_MtE: Tensor  # C of each head
    from_start_Mt1: Tensor  # e^G
    local_MtP: Tensor  # (C Bᵀ ∘ D) X + d X
    write_MEt: Tensor  # Bᵀ of each head
    taken_MtP: Tensor  # e^(G_64 − G) dt X
    decay_M11: Tensor  # e^(G_64)

    def advance_into(self, at: slice, state_MEP: Tensor, out_MtP: Tensor) -> None:
        torch.bmm(self.read_MtE[at], state_MEP, out=out_MtP)
        torch.addcmul(self.local_MtP[at], out_MtP, self.from_start_Mt1[at], out=out_MtP)
        state_MEP.mul_(self.decay_M11[at]).baddbmm_(self.write_MEt[at], self.taken_MtP[at])

    def transition_into(self, at: slice, transition_H: Tensor) -> None:
        transition_H.mul_(self.decay_M11[at].flatten())


@cache
def _bound_above_diagonal(device: torch.device) -> Tensor:
    """Return upper bounds of the exponents: −∞ above the diagonal, where they could overflow, else +∞."""
    above_tt = torch.ones(CHUNK, CHUNK, device=device).triu(1).bool()
    return torch.full((CHUNK, CHUNK), float("inf"), device=device).masked_fill(above_tt, float("-inf"))


def prepare(given: Inputs, a_H: Tensor, skip_H: Tensor) -> Chunks:
    """Do all work on n chunks that needs no state. `a_H` are the decay rates, below 0."""
    n, _, n_heads, _ = given.x_ntHP.shape
    grouped = (n, given.b_ntGE.shape[2], -1)
    dt_nHt = given.dt_ntH.transpose(1, 2)
    digits_nHt = (dt_nHt.double() * (LOG2_E * a_H.double().unsqueeze(-1))).clamp_min_(-FORGOTTEN)
    sum_nHt = digits_nHt.cumsum(-1)

    b_nGtE, c_nGtE = (t.transpose(1, 2).contiguous() for t in (given.b_ntGE, given.c_ntGE))
    dots_nG1tt = torch.bmm(c_nGtE.flatten(0, 1), b_nGtE.flatten(0, 1).mT).view(*grouped[:2], 1, CHUNK, CHUNK)
    weight_nHtt = _weights(sum_nHt, dt_nHt)
    attend_nHtt = weight_nHtt.view(*grouped, CHUNK, CHUNK).mul_(dots_nG1tt).view(weight_nHtt.shape)
    attend_nHtt.diagonal(dim1=-2, dim2=-1).add_(skip_H.unsqueeze(-1))
    x_MtP = given.x_ntHP.transpose(1, 2).flatten(0, 1)

    sums_nHt = sum_nHt.float()
    to_end_nHt = _power((sum_nHt[..., -1:] - sum_nHt).float()).mul_(dt_nHt)
    from_start_nHt = _power(sums_nHt)
    read_MtE, write_MtE = (_of_heads(t, n_heads) for t in (c_nGtE, b_nGtE))
    return Chunks(
        read_MtE=read_MtE,
        from_start_Mt1=from_start_nHt.view(-1, CHUNK, 1),
        local_MtP=torch.bmm(attend_nHtt.flatten(0, 1), x_MtP),
        write_MEt=write_MtE.mT,
        taken_MtP=x_MtP * to_end_nHt.view(-1, CHUNK, 1),
        decay_M11=from_start_nHt[..., -1].reshape(-1, 1, 1),
    )


def _weights(sum_nHt: Tensor, dt_nHt: Tensor) -> Tensor:
    """Return D, from running sums of binary digits in float64: [n, H, t, t]."""
    coarse_nHt = (sum_nHt * 2**GRID_BITS).round_().mul_(2**-GRID_BITS)
    fine_nHt, coarse_nHt = (sum_nHt - coarse_nHt).float(), coarse_nHt.float()
    weight_nHtt: Tensor = coarse_nHt.unsqueeze(-1) - coarse_nHt.unsqueeze(-2)
    weight_nHtt.add_(fine_nHt.unsqueeze(-1))
    torch.minimum(weight_nHtt, _bound_above_diagonal(dt_nHt.device), out=weight_nHtt)
    exp2_(weight_nHtt.view(-1))
    return weight_nHtt.mul_(_power(-fine_nHt).mul_(dt_nHt).unsqueeze(-2))


def _power(digits_nHt: Tensor) -> Tensor:
    """Return 2^x in new memory."""
    out_nHt, vectors = empty_vectors(*digits_nHt.shape, device=digits_nHt.device)
    out_nHt.copy_(digits_nHt)
    exp2_(vectors)
    return out_nHt


def _of_heads(of_groups_nGtE: Tensor, n_heads: int) -> Tensor:
    """Repeat B or C for each head, [M, t, E]; one chunk of one group is not copied."""
    n, n_groups, *rest = of_groups_nGtE.shape
    return of_groups_nGtE.unsqueeze(2).expand(n, n_groups, n_heads // n_groups, *rest).reshape(-1, *rest)


def decode_step(given: Inputs, a_H: Tensor, skip_H: Tensor, state_BHEP: Tensor) -> Tensor:
    """Process one token (t = 1) of each of B sequences: return outputs [B, H, P]; update states in place."""
    x_BHP, dt_BH, b_BGE, c_BGE = (t[:, 0] for t in (given.x_ntHP, given.dt_ntH, given.b_ntGE, given.c_ntGE))
    b_BHE, c_BHE = (t.repeat_interleave(x_BHP.shape[1] // t.shape[1], 1) for t in (b_BGE, c_BGE))
    decay_BH11 = (dt_BH * a_H).exp_()[..., None, None]
    read_BHP = rank_one_step(c_BHE, b_BHE, dt_BH.unsqueeze(-1) * x_BHP, decay_BH11, state_BHEP)
    return read_BHP.addcmul_(skip_H.unsqueeze(-1), x_BHP)


class StateSpaceDual(RecurrentMixer[Mamba2]):
    """The mixer of Granite 4, Bamba, Nemotron-H, Falcon-H1 and of Mamba-2 itself."""

    convolution: ShortConvolution

    def __init__(self, shape: Mamba2, weights: Weights) -> None:
        self.shape = shape
        self.in_proj, self.out_proj = weights.linear("in_proj"), weights.linear("out_proj")
        self.convolution = scaled_convolution(shape, weights)
        self.rate_H = weights.vector("A_log").exp_().neg_()
        self.skip_H = weights.vector("D")
        self.dt_bias_H = weights.vector("dt_bias")
        self.norm_I = weights.optional("norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        return (self.in_proj(x_ND, batch.n_prefill),)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (products[0][:, self.shape.inner :],)

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Compute gates [N, H]: the steps dt."""
        s = self.shape
        (projected_NE,) = products
        z_NI, mixed_NC, dt_NH = projected_NE.split((s.inner, s.channels, s.heads), -1)
        step_NH = softplus(dt_NH.float() * s.scales[-1] + self.dt_bias_H).clamp_(*s.step_limits)
        return Rows(mixed_NC, step_NH, z_NI)

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        return prepare(self._inputs(mixed_ntC, gates_ntX), self.rate_H, self.skip_H)

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        given = self._inputs(mixed_BC.unsqueeze(1), gates_BX.unsqueeze(1))
        return decode_step(given, self.rate_H, self.skip_H, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        """Apply the output's gate, and the norm of each group before or after it."""
        s, z_nI = self.shape, rows.z_NX[at].float()
        gate_nI = silu(z_nI if s.scales[0] == 1.0 else z_nI * s.scales[0])
        if s.normed and s.norm_first:
            rows.out_NX[at] = self._norm_(read_nX.flatten(1)).mul_(gate_nI)
            return
        gate_nI.unflatten(-1, (s.heads, s.head_dim)).mul_(read_nX)
        rows.out_NX[at] = self._norm_(gate_nI) if s.normed else gate_nI

    def _norm_(self, y_nI: Tensor) -> Tensor:
        """Norm the channels of each group, in place."""
        y_nGX = y_nI.unflatten(-1, (self.shape.groups, -1))
        y_nGX.mul_(inverse_rms(y_nGX, self.shape.norm_eps))
        assert self.norm_I is not None
        return y_nI.mul_(self.norm_I)

    def _inputs(self, mixed_ntC: Tensor, dt_ntH: Tensor) -> Inputs:
        """Split channels into x, B and C."""
        s = self.shape
        x_ntI, b_ntX, c_ntX = mixed_ntC.split((s.inner, s.groups * s.state, s.groups * s.state), -1)
        b_ntGE, c_ntGE = (t.unflatten(-1, (s.groups, s.state)) for t in (b_ntX, c_ntX))
        return Inputs(x_ntI.unflatten(-1, (s.heads, s.head_dim)), dt_ntH, b_ntGE, c_ntGE)


def scaled_convolution(shape: Mamba2, weights: Weights) -> ShortConvolution:
    """Build the convolution of x, B and C, with their scales multiplied into the taps."""
    widths = torch.tensor((shape.inner, shape.groups * shape.state, shape.groups * shape.state))
    scale_C11 = torch.tensor(shape.scales[1:4]).repeat_interleave(widths)[:, None, None].to(weights.device)
    bias_C = weights.optional("conv1d.bias")
    return ShortConvolution(weights.vector("conv1d.weight") * scale_C11, bias_C)

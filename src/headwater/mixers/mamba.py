"""Mamba-1: h' = e^(dt A) h + dt x B, y = C h + D x for each channel (Gu and Dao, 2023, section 3).

Every channel has decays of its own for each of its states, so no product of matrices is possible: the work is
arithmetic on tokens × states × channels, in five passes:

    a = 2^(dt A log₂e)      b = dt x B      h_t = a_t h_(t−1) + b_t      y = C h

All but the third are done for several tokens at once, as many as keep a and h in cache, and channels stand last, so
that B and C (of a state) and dt and x (of a channel) are spread without being copied. Every exponent is at most 0. A
chunk is padded with dt = 0, which leaves h as it is.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, L tokens of a stretch, S or B sequences, E
states a channel, C channels, R channels of the step's projection, D model width, X any leading dimensions. Chunks and
states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.layers.mamba import Mamba
from headwater.mixers.activations import LOG2_E, RMSNorm, empty_vectors, exp2_, silu, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

STRETCH = 1 << 17  # elements of a and of h: half a megabyte each
ELEMENTS_A_BLOCK = 1 << 18  # tokens × channels whose steps and the like stay in cache


def selective_scan(
    x_TC: Tensor, dt_TC: Tensor, rate_EC: Tensor, b_TE: Tensor, c_TE: Tensor, state_EC: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the scan token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, C] without the skip, and the state after the last token, in the dtype of the arguments.
    Mamba (Gu and Dao, 2023), equations 2 and 4, with A (`rate_EC`, negative) diagonal in each channel, its decay
    discretised exactly and B to first order, as the authors' code does: a channel's states forget over a step `dt`,
    and take in the step times x along B.
    """
    state_EC = state_EC.clone()
    out_TC = torch.empty_like(x_TC)
    for t in range(x_TC.shape[0]):
        state_EC *= (dt_TC[t] * rate_EC).exp()
        state_EC += (dt_TC[t] * x_TC[t]) * b_TE[t].unsqueeze(-1)
        out_TC[t] = (state_EC * c_TE[t].unsqueeze(-1)).sum(0)
    return out_TC, state_EC


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    dt_ntC: Tensor  # 0 in padding
    taken_ntC: Tensor  # dt x
    skip_ntC: Tensor  # D x
    b_ntE1: Tensor
    c_nt2E: Tensor  # C twice: a batched product with a single row has other bits
    log2_rate_EC: Tensor  # A log₂e

    def advance_into(self, at: slice, state_SEC: Tensor, out_StC: Tensor) -> None:
        n_sequences, n_states, channels = state_SEC.shape
        length = _stretch(state_SEC.numel())
        h_LSEC = state_SEC.new_empty(length, *state_SEC.shape)
        decay_LSEC, vectors = empty_vectors(length, *state_SEC.shape, device=state_SEC.device)
        steps = list(zip(h_LSEC, decay_LSEC, strict=True))
        h_MEC = h_LSEC.view(-1, n_states, channels)
        # Tokens before sequences, as h has them.
        dt_tS1C, taken_tS1C = (x_StC.transpose(0, 1).unsqueeze(2) for x_StC in (self.dt_ntC[at], self.taken_ntC[at]))
        b_tSE1 = self.b_ntE1[at].transpose(0, 1)
        c_tS2E = self.c_nt2E[at].transpose(0, 1)
        skip_tSC, out_tSC = self.skip_ntC[at].transpose(0, 1), out_StC.transpose(0, 1)
        for first in range(0, CHUNK, length):
            tokens = slice(first, first + length)
            torch.mul(dt_tS1C[tokens], self.log2_rate_EC, out=decay_LSEC)
            exp2_(vectors)
            torch.mul(taken_tS1C[tokens], b_tSE1[tokens], out=h_LSEC)
            before_SEC = state_SEC
            for h_SEC, decay_SEC in steps:
                before_SEC = h_SEC.addcmul_(decay_SEC, before_SEC)
            state_SEC.copy_(before_SEC)
            read_M2C = torch.bmm(c_tS2E[tokens].reshape(-1, 2, n_states), h_MEC)
            read_LSC = read_M2C[:, 0].view(length, n_sequences, channels)
            torch.add(read_LSC, skip_tSC[tokens], out=out_tSC[tokens])

    def transition_into(self, at: slice, transition_C: Tensor) -> None:
        """Add the chunk's steps to a running sum of them.

        Halves are added to each other: a sum over a dimension may be split in another way in a larger tensor.
        """
        (sum_lC,) = self.dt_ntC[at]
        while (half := len(sum_lC) // 2) > 0:
            sum_lC = sum_lC[:half] + sum_lC[half:]
        transition_C += sum_lC[0]


def decay(transition_SC: Tensor, log2_rate_EC: Tensor) -> Tensor:
    """Return the factors of a state over sums of steps, [S, E, C]."""
    decay_SEC, vectors = empty_vectors(len(transition_SC), *log2_rate_EC.shape, device=transition_SC.device)
    torch.mul(transition_SC.unsqueeze(1), log2_rate_EC, out=decay_SEC)
    exp2_(vectors)
    return decay_SEC


def decode_step(taken_BC: Tensor, b_BE: Tensor, c_BE: Tensor, decay_BEC: Tensor, state_BEC: Tensor) -> Tensor:
    """Process one token of each of B sequences: return what it reads, [B, C]; update states in place.

    `decay_BEC` is overwritten: it receives the new states, contiguous, as a batched product takes them.
    """
    h_BEC = decay_BEC.mul_(state_BEC).addcmul_(taken_BC.unsqueeze(1), b_BE.unsqueeze(-1))
    state_BEC.copy_(h_BEC)
    return torch.bmm(_twice(c_BE), h_BEC)[:, 0]


def _twice(c_XE: Tensor) -> Tensor:
    return c_XE.unsqueeze(-2).repeat(*(1,) * (c_XE.dim() - 1), 2, 1)


def _stretch(state_size: int) -> int:
    """Return the tokens of a stretch, a power of two."""
    length = CHUNK
    while length > 1 and length * state_size > STRETCH:
        length //= 2
    return length


class SelectiveStateSpace(RecurrentMixer[Mamba]):
    """The mixer of Mamba and Jamba. States stand [E, C]: channels last, as the scan runs over them."""

    convolution: ShortConvolution

    def __init__(self, shape: Mamba, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = weights.linear("in_proj")
        self.out_proj = weights.linear("out_proj")
        self.convolution = ShortConvolution(
            weights.stored("conv1d.weight").to(weights.device), weights.optional("conv1d.bias")
        )
        self.x_proj = weights.linear("x_proj")
        self.dt_proj = weights.packed(weights.parts("dt_proj.weight"))
        self.dt_bias_C = weights.vector("dt_proj.bias")  # added in float32, also in a bfloat16 model
        self.log2_rate_EC = weights.vector("A_log").exp_().mul_(-LOG2_E).T.contiguous()
        self.skip_C = weights.vector("D")
        self.norms = _norms(shape, weights)
        self.chunks_a_block = max(1, ELEMENTS_A_BLOCK // (CHUNK * shape.inner))

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        return (self.in_proj(x_ND, batch.n_prefill),)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (products[0][:, : self.shape.inner],)

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Set gates to 1 for tokens; they are 0 for padding, whose step must be zero."""
        mixed_NC, z_NC = products[0].chunk(2, -1)
        ones_N1 = torch.ones(len(mixed_NC), 1, device=mixed_NC.device)
        return Rows(mixed_NC, ones_N1, z_NC)

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        dt_ntC, b_ntE, c_ntE = self.steps(mixed_ntC, prefill=True)
        taken_ntC = dt_ntC.mul_(gates_ntX) * mixed_ntC
        skip_ntC = mixed_ntC * self.skip_C
        return Chunks(dt_ntC, taken_ntC, skip_ntC, b_ntE.unsqueeze(-1), _twice(c_ntE), self.log2_rate_EC)

    def identity(self) -> Tensor:
        """Return the identity as a sum of no steps, [C]: a state is multiplied by e^(A sum)."""
        return torch.zeros(self.shape.inner)

    def carried(self, transition_X: Tensor, state_X: Tensor) -> Tensor:
        return decay(transition_X[None], self.log2_rate_EC)[0].mul_(state_X)

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        dt_BC, b_BE, c_BE = self.steps(mixed_BC, prefill=False)
        read_BC = decode_step(dt_BC * mixed_BC, b_BE, c_BE, decay(dt_BC, self.log2_rate_EC), state_BX)
        return torch.addcmul(read_BC, mixed_BC, self.skip_C)

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        rows.out_NX[at] = silu(rows.z_NX[at].float()).mul_(read_nX)

    def steps(self, mixed_XC: Tensor, prefill: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute steps [X, C], and B and C [X, E], in float32, from the convolved channels."""
        leading = mixed_XC.shape[:-1]
        mixed_NC = mixed_XC.flatten(0, -2)
        dt_NC, b_NE, c_NE = self.step_products(mixed_NC, len(mixed_NC) if prefill else 0)
        dt_NC = softplus(dt_NC.float().add_(self.dt_bias_C))
        return tuple(t.unflatten(0, leading) for t in (dt_NC, b_NE.float(), c_NE.float()))

    def step_products(self, mixed_NC: Tensor, n_prefill: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute steps before bias and softplus, [N, C], and B and C, [N, E], from the convolved channels."""
        s = self.shape
        parts = self.x_proj(mixed_NC.to(self.x_proj.dtype), n_prefill).split((s.step_rank, s.state, s.state), -1)
        dt_NR, b_NE, c_NE = (p if norm is None else norm(p) for p, norm in zip(parts, self.norms, strict=True))
        return self.dt_proj(dt_NR.to(self.dt_proj.dtype), n_prefill), b_NE, c_NE


def _norms(shape: Mamba, weights: Weights) -> tuple[RMSNorm | None, ...]:
    """Build the norms of the step's channels, B and C, or three times None."""
    if not shape.normed:
        return (None,) * 3
    norms = []
    for name, width in (("dt", shape.step_rank), ("b", shape.state), ("c", shape.state)):
        weight_W = weights.optional(f"{name}_layernorm.weight")
        norms.append(
            RMSNorm(torch.ones(width, device=weights.device) if weight_W is None else weight_W, shape.norm_eps)
        )
    return tuple(norms)

"""The selective scan over chunks of 64 tokens (prefill) and one token at a time for many sequences (decode).

Every channel has decays of its own for each of its states, so there is no product of matrices: the work is arithmetic
on tokens × states × channels, in five passes:

    a = 2^(dt A log₂e)      b = dt x B      h_t = a_t h_(t−1) + b_t      y = C h

All but the third are done for several tokens at once, as many as keep a and h in cache, and channels stand last, so
that B and C (of a state) and dt and x (of a channel) are spread without being copied. Every exponent is at most 0. A
chunk is padded with dt = 0, which leaves h as it is.

n chunks (of any sequences), t = 64 tokens, L tokens of a stretch, S or B sequences, N states a channel, C channels. All
float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.activations import empty_vectors, exp2_
from headwater.mixers.batch import CHUNK

STRETCH = 1 << 17  # elements of a and of h: half a megabyte each


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    dt_ntC: torch.Tensor  # 0 in padding
    taken_ntC: torch.Tensor  # dt x
    skip_ntC: torch.Tensor  # D x
    b_ntN1: torch.Tensor
    c_nt2N: torch.Tensor  # C twice: a batched product with a single row has other bits


def prepare(
    x_ntC: torch.Tensor, dt_ntC: torch.Tensor, b_ntN: torch.Tensor, c_ntN: torch.Tensor, skip_C: torch.Tensor
) -> Chunks:
    """Do all work on n chunks that needs no state."""
    return Chunks(
        dt_ntC=dt_ntC,
        taken_ntC=dt_ntC * x_ntC,
        skip_ntC=x_ntC * skip_C,
        b_ntN1=b_ntN.unsqueeze(-1),
        c_nt2N=_twice(c_ntN),
    )


def advance_into(
    chunks: Chunks, at: slice, log2_rate_NC: torch.Tensor, state_SNC: torch.Tensor, out_StC: torch.Tensor
) -> None:
    """Advance several sequences by one chunk each: update their states in place, write their outputs to `out_StC`."""
    n_sequences, n_states, channels = state_SNC.shape
    length = _stretch(state_SNC.numel())
    h_LSNC = state_SNC.new_empty(length, *state_SNC.shape)
    decay_LSNC, vectors = empty_vectors(length, *state_SNC.shape, device=state_SNC.device)
    steps = list(zip(h_LSNC, decay_LSNC, strict=True))
    h_MNC = h_LSNC.view(-1, n_states, channels)
    # Tokens before sequences, as h has them.
    dt_tS1C, taken_tS1C = (x_StC.transpose(0, 1).unsqueeze(2) for x_StC in (chunks.dt_ntC[at], chunks.taken_ntC[at]))
    b_tSN1 = chunks.b_ntN1[at].transpose(0, 1)
    c_tS2N = chunks.c_nt2N[at].transpose(0, 1)
    skip_tSC, out_tSC = chunks.skip_ntC[at].transpose(0, 1), out_StC.transpose(0, 1)
    for first in range(0, CHUNK, length):
        tokens = slice(first, first + length)
        torch.mul(dt_tS1C[tokens], log2_rate_NC, out=decay_LSNC)
        exp2_(vectors)
        torch.mul(taken_tS1C[tokens], b_tSN1[tokens], out=h_LSNC)
        before_SNC = state_SNC
        for h_SNC, decay_SNC in steps:
            before_SNC = h_SNC.addcmul_(decay_SNC, before_SNC)
        state_SNC.copy_(before_SNC)
        read_M2C = torch.bmm(c_tS2N[tokens].reshape(-1, 2, n_states), h_MNC)
        read_LSC = read_M2C[:, 0].view(length, n_sequences, channels)
        torch.add(read_LSC, skip_tSC[tokens], out=out_tSC[tokens])


def transition_into(chunks: Chunks, at: slice, transition_SC: torch.Tensor) -> None:
    """Add the chunks' steps to running sums of them, in place.

    Halves are added to each other: a sum over a dimension may be split otherwise where it stands beside others.
    """
    sum_SlC = chunks.dt_ntC[at]
    while (half := sum_SlC.shape[1] // 2) > 0:
        sum_SlC = sum_SlC[:, :half] + sum_SlC[:, half:]
    transition_SC += sum_SlC[:, 0]


def decay(transition_SC: torch.Tensor, log2_rate_NC: torch.Tensor) -> torch.Tensor:
    """Return the factors of a state over sums of steps, [S, N, C]."""
    decay_SNC, vectors = empty_vectors(len(transition_SC), *log2_rate_NC.shape, device=transition_SC.device)
    torch.mul(transition_SC.unsqueeze(1), log2_rate_NC, out=decay_SNC)
    exp2_(vectors)
    return decay_SNC


def decode_step(
    taken_BC: torch.Tensor, b_BN: torch.Tensor, c_BN: torch.Tensor, decay_BNC: torch.Tensor, state_BNC: torch.Tensor
) -> torch.Tensor:
    """Process one token of each of B sequences: return what it reads, [B, C]; update states in place.

    `decay_BNC` is overwritten: it receives the new states, contiguous, as a batched product takes them.
    """
    h_BNC = decay_BNC.mul_(state_BNC).addcmul_(taken_BC.unsqueeze(1), b_BN.unsqueeze(-1))
    state_BNC.copy_(h_BNC)
    return torch.bmm(_twice(c_BN), h_BNC)[:, 0]


def _twice(c_XN: torch.Tensor) -> torch.Tensor:
    return c_XN.unsqueeze(-2).repeat(*(1,) * (c_XN.dim() - 1), 2, 1)


def _stretch(state_size: int) -> int:
    """Return the tokens of a stretch, a power of two."""
    length = CHUNK
    while length > 1 and length * state_size > STRETCH:
        length //= 2
    return length

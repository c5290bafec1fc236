"""The gated delta rule in chunks, differentiable: what `headwater.mixers.gdn` computes in place.

With G the running sum of g within a chunk, D[i, j] = e^(G_i − G_j), and A the part of β (K Kᵀ ∘ D) below the diagonal
(Gated Delta Networks, Yang, Kautz and Hatamizadeh 2024, section 3.3):

    U = (I + A)⁻¹ β V,  W = (I + A)⁻¹ β e^G K                      of all chunks at once
    E = U − W S,  S' = e^(G_t) S + (e^(G_t − G) K)ᵀ E               chunk after chunk
    O = e^G Q S + (Q Kᵀ ∘ D) E                                      of all chunks at once

B sequences, T tokens, n chunks, t tokens a chunk, H heads, M = B·H, K key width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ of strictly lower triangular A [..., t, t]."""

    @staticmethod
    def forward(ctx: Any, a_tt: torch.Tensor) -> torch.Tensor:
        unit_tt = torch.eye(a_tt.shape[-1], dtype=a_tt.dtype, device=a_tt.device)
        inverse_tt = torch.linalg.solve_triangular(a_tt, unit_tt, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse_tt)
        return inverse_tt

    @staticmethod
    def backward(ctx: Any, grad_tt: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (inverse_tt,) = ctx.saved_tensors
        return -(inverse_tt.mT @ grad_tt @ inverse_tt.mT).tril(-1)


class Scan(torch.autograd.Function):
    """The part that goes chunk after chunk, from a state of zeros: states before each chunk, and corrections E.

    Takes W [M, n, t, K], U [M, n, t, V], (e^(G_t − G) K)ᵀ [M, n, K, t] and e^(G_t) [M, n, 1, 1].
    """

    @staticmethod
    def forward(
        ctx: Any, known: torch.Tensor, value: torch.Tensor, write: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = known.new_empty(*known.shape[:2], known.shape[-1], value.shape[-1])
        corrections = torch.empty_like(value)
        state = torch.zeros_like(states[:, 0])
        for i in range(known.shape[1]):
            states[:, i] = state
            correction = torch.baddbmm(value[:, i], known[:, i], state, alpha=-1)
            corrections[:, i] = correction
            state = torch.baddbmm(state * last[:, i], write[:, i], correction)
        ctx.save_for_backward(known, write, last, states, corrections)
        return states, corrections

    @staticmethod
    def backward(ctx: Any, d_states: torch.Tensor, d_corrections: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        known, write, last, states, corrections = ctx.saved_tensors
        d_value = torch.empty_like(corrections)
        d_after = torch.empty_like(states)  # of the state after each chunk
        d_state = torch.zeros_like(states[:, 0])
        for i in reversed(range(known.shape[1])):
            d_after[:, i] = d_state
            d_correction = torch.baddbmm(d_corrections[:, i], write[:, i].mT, d_state)
            d_value[:, i] = d_correction
            d_state = torch.baddbmm(d_state * last[:, i] + d_states[:, i], known[:, i].mT, d_correction, alpha=-1)
        d_last = (d_after * states).sum((-2, -1), keepdim=True)
        return -d_value @ states.mT, d_value, d_after @ corrections.mT, d_last


@dataclass(frozen=True)
class Chunks:
    """Contributions of chunks that do not depend on the state before them."""

    system_Mntt: torch.Tensor  # A
    known_MntK: torch.Tensor  # β e^G K
    value_MntV: torch.Tensor  # β V
    write_MnKt: torch.Tensor  # (e^(G_t − G) K)ᵀ
    last_Mn11: torch.Tensor  # e^(G_t)
    attend_Mntt: torch.Tensor  # Q Kᵀ ∘ D
    read_MntK: torch.Tensor  # e^G Q


def prepare(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    g_BTH: torch.Tensor,
    beta_BTH: torch.Tensor,
    chunk: int = CHUNK,
) -> Chunks:
    """All that needs neither inverse nor state. q and k come normalised and scaled, g is the logarithm of the decay."""
    missing = -q_BTHK.shape[1] % chunk
    q_MntK, k_MntK, v_MntV = (_chunked(x, chunk, missing) for x in (q_BTHK, k_BTHK, v_BTHV))
    g_Mnt1, beta_Mnt1 = (_chunked(x.unsqueeze(-1), chunk, missing) for x in (g_BTH, beta_BTH))
    total_Mnt1 = g_Mnt1.cumsum(-2)
    upto = torch.ones(chunk, chunk, dtype=torch.bool, device=g_BTH.device).tril()
    decay_Mntt = (total_Mnt1 - total_Mnt1.mT).masked_fill(~upto, -torch.inf).exp()
    from_start_Mnt1 = total_Mnt1.exp()
    last_Mn11 = total_Mnt1[:, :, -1:]
    k_beta_MntK = k_MntK * beta_Mnt1
    return Chunks(
        system_Mntt=(k_beta_MntK @ k_MntK.mT * decay_Mntt).tril(-1),
        known_MntK=k_beta_MntK * from_start_Mnt1,
        value_MntV=v_MntV * beta_Mnt1,
        write_MnKt=(k_MntK * (last_Mn11 - total_Mnt1).exp()).mT,
        last_Mn11=last_Mn11.exp(),
        attend_Mntt=q_MntK @ k_MntK.mT * decay_Mntt,
        read_MntK=q_MntK * from_start_Mnt1,
    )


def advance(chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """States before each chunk [M, n, K, V], and corrections [M, n, t, V], from a state of zeros."""
    solve_Mntt = UnitLowerInverse.apply(chunks.system_Mntt)
    known_MntK, value_MntV = solve_Mntt @ chunks.known_MntK, solve_Mntt @ chunks.value_MntV
    return Scan.apply(known_MntK, value_MntV, chunks.write_MnKt, chunks.last_Mn11)


def read(
    chunks_read: tuple[torch.Tensor, torch.Tensor], advanced: tuple[torch.Tensor, torch.Tensor], n: int, length: int
) -> torch.Tensor:
    """Outputs [B, T, H, V] of B = n sequences; `chunks_read` are e^G Q and Q Kᵀ ∘ D."""
    (read_MntK, attend_Mntt), (states_MnKV, corrections_MntV) = chunks_read, advanced
    out_MntV = read_MntK @ states_MnKV + attend_Mntt @ corrections_MntV
    return out_MntV.flatten(1, 2)[:, :length].unflatten(0, (n, -1)).transpose(1, 2)


def delta_rule(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    g_BTH: torch.Tensor,
    beta_BTH: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """All of it: outputs [B, T, H, V] from states of zeros, in the dtype of its arguments."""
    chunks = prepare(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, chunk)
    return read((chunks.read_MntK, chunks.attend_Mntt), advance(chunks), *q_BTHK.shape[:2])


def _chunked(x_BTHX: torch.Tensor, chunk: int, missing: int) -> torch.Tensor:
    """[M, n, t, X], filled up with zeros: such a token leaves the state as it is."""
    padded_BTHX = F.pad(x_BTHX, (0, 0, 0, 0, 0, missing)) if missing else x_BTHX
    return padded_BTHX.transpose(1, 2).unflatten(2, (-1, chunk)).flatten(0, 1)

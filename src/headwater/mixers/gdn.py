"""Gated DeltaNet: S' = e^g S + k (β (v − e^g Sᵀk))ᵀ, o = S'ᵀ q (Yang, Kautz and Hatamizadeh, 2024, section 3).

A chunk's corrections solve a triangular system (the WY form; section 3.3). With G the running sum of g within the
chunk, D[i, j] = e^(G_i − G_j), and A the part of β (K Kᵀ ∘ D) below the diagonal:

    E  = (I + A)⁻¹ (β V − β e^G K S)        the corrections, all 64 at once
    O  = e^G Q S + (Q Kᵀ ∘ D) E
    S' = e^(G_64) S + (e^(G_64 − G) K)ᵀ E

Work that does not need S is done for several chunks at once; the rest is three batched products a chunk. Every exponent
is at most 0, so no decay overflows. A chunk is padded with β = 0 and g = 0, which leaves S as it is.

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, B decoding sequences, G key heads, H value
heads, K key width, V value width, C convolved channels, D model width; M = n·H: chunks and heads as one batch. Chunks
and states are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headwater.layers.gdn import DeltaNet
from headwater.mixers.activations import gated_rms_norm_into, inverse_l2, sigmoid, softplus
from headwater.mixers.batch import StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import Linear
from headwater.mixers.products import rows
from headwater.mixers.recurrent import RecurrentMixer, Rows, Shape, queries_keys_values, scratch
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache: 2-4 chunks of a small model, 1 of a large


def delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THX: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rule token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).
    Gated Delta Networks, equation 10, with g the logarithm of its decay α: the state forgets, predicts v from k, and is
    corrected by β times the error. q and k come normalised and scaled, one a value head. Decays are one a head, [T, H],
    or one a key channel, [T, H, K] (Kimi Linear, 2025, equation 1).
    """
    decay_THX1 = g_THX.exp().reshape(*v_THV.shape[:2], -1, 1)
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        k_HK1 = k_THK[t].unsqueeze(-1)
        state_HKV *= decay_THX1[t]
        predicted_HV = (state_HKV * k_HK1).sum(1)
        error_HV = (v_THV[t] - predicted_HV) * beta_TH[t].unsqueeze(-1)
        state_HKV += k_HK1 * error_HV.unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV


@dataclass(frozen=True)
class Chunks:
    """The contributions of chunks that do not depend on the state before them."""

    read_MRK: Tensor  # R = 128 rows: e^G q, then β e^G k
    value_MtV: Tensor  # β v
    inverse_Mtt: Tensor  # (I + A)⁻¹
    attend_Mtt: Tensor  # Q Kᵀ ∘ D, zero above the diagonal
    write_MtK: Tensor  # e^(G_64 − G) k
    decay_MX1: Tensor  # e^(G_64): X = 1, or K where each key channel has its own (Kimi Delta Attention)

    def advance_into(self, at: slice, state_MKV: Tensor, out_MtV: Tensor) -> None:
        read_MRV = torch.bmm(self.read_MRK[at], state_MKV)
        error_MtV = torch.sub(self.value_MtV[at], read_MRV[:, CHUNK:])
        correction_MtV = torch.bmm(self.inverse_Mtt[at], error_MtV)
        torch.baddbmm(read_MRV[:, :CHUNK], self.attend_Mtt[at], correction_MtV, out=out_MtV)
        state_MKV.mul_(self.decay_MX1[at]).baddbmm_(self.write_MtK[at].mT, correction_MtV)

    def transition_into(self, at: slice, transition_MKK: Tensor) -> None:
        """Advance a state without values: T_chunk = e^(G_64) I − (e^(G_64 − G) K)ᵀ (I + A)⁻¹ β e^G K."""
        read_MtK = torch.bmm(self.read_MRK[at][:, CHUNK:], transition_MKK)
        correction_MtK = torch.bmm(self.inverse_Mtt[at], read_MtK)
        transition_MKK.mul_(self.decay_MX1[at]).baddbmm_(self.write_MtK[at].mT, correction_MtK, alpha=-1)


@cache
def _not_above_diagonal(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return upper bounds of G_i − G_j (−∞ above the diagonal, where it could overflow), and the unit matrix."""
    bound_tt = torch.zeros(CHUNK, CHUNK, device=device)
    above_tt = torch.ones(CHUNK, CHUNK, device=device).triu(1).bool()
    return bound_tt.masked_fill(above_tt, float("-inf")), torch.eye(CHUNK, device=device)


def norm_scales(qk_X2GK: Tensor) -> Tensor:
    """Return the factors, [X, 2, G, 1], that norm queries and keys and scale queries by 1/√K."""
    scale_X2G1 = inverse_l2(qk_X2GK)
    scale_X2G1[..., 0, :, :] *= qk_X2GK.shape[-1] ** -0.5
    return scale_X2G1


def prepare(qk_nt2GK: Tensor, v_ntHV: Tensor, g_ntH: Tensor, beta_ntH: Tensor) -> Chunks:
    """Normalise and scale queries and keys, and do all work on n chunks that needs no state."""
    n, _, _, n_key_heads, key_width = qk_nt2GK.shape
    n_heads = v_ntHV.shape[2]
    bound_tt, unit_tt = _not_above_diagonal(qk_nt2GK.device)

    qk_nG2tK = qk_nt2GK.new_empty(n, n_key_heads, 2, CHUNK, key_width)
    torch.mul(qk_nt2GK, norm_scales(qk_nt2GK), out=qk_nG2tK.permute(0, 3, 2, 1, 4))
    qk_mRK = qk_nG2tK.view(n * n_key_heads, 2 * CHUNK, key_width)
    dots_nG1Rt = torch.bmm(qk_mRK, qk_mRK[:, CHUNK:].mT).view(n, n_key_heads, 1, 2 * CHUNK, CHUNK)

    grouped = (n, n_key_heads, n_heads // n_key_heads)
    # In float64: after a strong decay the sums are large, and the small differences between them matter.
    cumulative_nHt = g_ntH.transpose(1, 2).double().cumsum(-1)
    beta_nHt = beta_ntH.transpose(1, 2).contiguous()
    decay_nHtt = (cumulative_nHt.unsqueeze(-1) - cumulative_nHt.unsqueeze(-2)).float()
    torch.minimum(decay_nHtt, bound_tt, out=decay_nHtt).exp_()
    decay_nGrtt = decay_nHtt.view(*grouped, CHUNK, CHUNK)
    attend = dots_nG1Rt[..., :CHUNK, :] * decay_nGrtt
    system = decay_nGrtt.mul_(dots_nG1Rt[..., CHUNK:, :]).mul_(beta_nHt.view(*grouped, CHUNK, 1))
    inverse = torch.linalg.solve_triangular(system.view(-1, CHUNK, CHUNK), unit_tt, upper=False, unitriangular=True)

    from_start_nHt = cumulative_nHt.float().exp_()
    to_end_nHt = (cumulative_nHt[..., -1:] - cumulative_nHt).float().exp_()
    row_scale_nHR = torch.cat((from_start_nHt, from_start_nHt * beta_nHt), -1)
    qk_nG1RK = qk_nG2tK.view(n, n_key_heads, 1, 2 * CHUNK, key_width)
    read = qk_nG1RK * row_scale_nHR.view(*grouped, 2 * CHUNK, 1)
    write = qk_nG1RK[..., CHUNK:, :] * to_end_nHt.view(*grouped, CHUNK, 1)
    value_nHtV = torch.empty_like(v_ntHV.transpose(1, 2), memory_format=torch.contiguous_format)
    torch.mul(v_ntHV.transpose(1, 2), beta_nHt.unsqueeze(-1), out=value_nHtV)
    return Chunks(
        read_MRK=read.view(-1, 2 * CHUNK, key_width),
        value_MtV=value_nHtV.view(-1, CHUNK, v_ntHV.shape[-1]),
        inverse_Mtt=inverse,
        attend_Mtt=attend.view(-1, CHUNK, CHUNK),
        write_MtK=write.view(-1, CHUNK, key_width),
        decay_MX1=from_start_nHt[..., -1].reshape(-1, 1, 1),
    )


def decode_step(qk_B2GK: Tensor, v_BHV: Tensor, g_BHX: Tensor, beta_BH: Tensor, state_BHKV: Tensor) -> Tensor:
    """Process one token of each of B sequences: return outputs [B, H, V]; update states (of any stride) in place.

    Decays are one a head (X = 1) or one a key channel (X = K).

    q and k are read from the decayed state as two rows of one product (a single row is another kernel, whose bits
    depend on the batch); then S' = e^g S + k eᵀ gives o = S'ᵀ q = e^g Sᵀ q + (k·q) e.
    """
    n_key_heads, k_dim = qk_B2GK.shape[2:]
    n, n_heads, v_dim = v_BHV.shape
    qk_BH2K = (qk_B2GK * norm_scales(qk_B2GK)).transpose(1, 2).repeat_interleave(n_heads // n_key_heads, 1)
    # The decayed states are contiguous, as one batch of all heads must be.
    decayed_BHKV = torch.mul(state_BHKV, g_BHX.exp().unsqueeze(-1), out=scratch(state_BHKV))
    read_MRV = torch.bmm(qk_BH2K.view(-1, 2, k_dim), decayed_BHKV.view(-1, k_dim, v_dim))
    read_BH2V = read_MRV.view(n, n_heads, 2, v_dim)
    q_BHK, k_BHK = qk_BH2K.unbind(2)
    error_BHV = (v_BHV - read_BH2V[:, :, 1]).mul_(beta_BH.unsqueeze(-1))
    torch.addcmul(decayed_BHKV, k_BHK.unsqueeze(-1), error_BHV.unsqueeze(-2), out=state_BHKV)
    return torch.addcmul(read_BH2V[:, :, 0], (q_BHK * k_BHK).sum(-1, keepdim=True), error_BHV)


class DeltaRule(RecurrentMixer[Shape]):
    """The common part of Gated DeltaNet and Kimi Delta Attention, whose transitions are dense."""

    convolution: ShortConvolution

    @abstractmethod
    def heads(self, mixed_XC: Tensor) -> tuple[Tensor, Tensor]:
        """Split channels into queries and keys, [X, 2, G, K], and values, [X, H, V]."""

    @abstractmethod
    def gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Split gates into log decays, [X, H, 1] or [X, H, K], and writing strengths, [X, H]."""

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        return decode_step(*self.heads(mixed_BC), *self.gates(gates_BX), state_BX)

    def identity(self) -> Tensor:
        """Return the identity as a matrix for each head: [H, K, K]."""
        heads, _, width = self.shape.transition or ()
        return torch.eye(width).repeat(heads, 1, 1)

    def carried(self, transition_X: Tensor, state_X: Tensor) -> Tensor:
        return torch.bmm(transition_X, state_X)


class GatedDeltaNet(DeltaRule[DeltaNet]):
    """The mixer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid."""

    def __init__(self, shape: DeltaNet, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = fused_projection(shape, weights)
        self.out_proj = weights.linear("out_proj")
        self.convolution = ShortConvolution(weights.stored("conv1d.weight").to(weights.device))
        self.decay_H = weights.vector("A_log").exp_().neg_()
        self.dt_bias_H = weights.vector("dt_bias")
        self.norm_V = weights.vector("norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.v_heads)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        return (self.in_proj(x_ND, batch.n_prefill),)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (projected_NE,), s = products, self.shape
        return projected_NE[:, : s.channels], projected_NE[:, s.channels + s.v_heads * s.v_dim :]

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Compute gates [N, 2, H]: the log decay, −e^A softplus(a + dt), and the strength, a multiple of sigmoid(b)."""
        s = self.shape
        (projected_NE,) = products
        widths = (s.channels, s.v_heads * s.v_dim, s.v_heads, s.v_heads)
        mixed_NC, z_NX, b_NH, a_NH = projected_NE.split(widths, -1)
        if has_kernels(a_NH.device):
            from headwater.mixers.gpu.pointwise import delta_gates  # needs Triton

            gates_N2H = delta_gates(a_NH, b_NH, self.dt_bias_H, self.decay_H, s.strength)
            return Rows(mixed_NC, gates_N2H, z_NX.unflatten(-1, (s.v_heads, s.v_dim)))
        g_NH = softplus(a_NH.float() + self.dt_bias_H).mul_(self.decay_H)
        gates_N2H = torch.stack((g_NH, sigmoid(b_NH.float()).mul_(s.strength)), 1)
        return Rows(mixed_NC, gates_N2H, z_NX.unflatten(-1, (s.v_heads, s.v_dim)))

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        g_ntH1, beta_ntH = self.gates(gates_ntX)
        return prepare(*self.heads(mixed_ntC), g_ntH1.squeeze(-1), beta_ntH)

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        gated_rms_norm_into(rows.out_NX[at], read_nX, rows.z_NX[at], self.norm_V, self.shape.norm_eps)

    def heads(self, mixed_XC: Tensor) -> tuple[Tensor, Tensor]:
        return queries_keys_values(mixed_XC, self.shape.k_heads, self.shape.k_dim, self.shape.v_dim)

    def gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        return gates[..., 0, :, None], gates[..., 1, :]


def fused_projection(shape: DeltaNet, weights: Weights) -> Linear:
    """Build one product whose outputs are [q | k | v | z | b | a], each in the order of heads.

    Stored key head by key head, rows are q, k, then v and z of the value heads that share it (b and a likewise).
    """
    if not shape.by_key_head:
        of_qkv = ("q", "k", "v") if shape.apart else ("qkv",)
        return weights.linear(*(f"in_proj_{name}" for name in (*of_qkv, "z", "b", "a")))
    heads = shape.k_heads
    shared = shape.v_heads // heads
    widths = (shape.k_dim, shape.k_dim, shared * shape.v_dim, shared * shape.v_dim)
    ordered = []
    for name, of_a_head in (("in_proj_qkvz", widths), ("in_proj_ba", (shared, shared))):
        row_HX = torch.arange(heads * sum(of_a_head)).unflatten(0, (heads, -1))
        rows_N = torch.cat([part_HX.flatten() for part_HX in row_HX.split(of_a_head, 1)])
        ordered.append(rows(weights.held(f"{name}.weight"), rows_N))
    return weights.packed(ordered)

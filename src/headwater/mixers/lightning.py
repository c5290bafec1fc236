"""Lightning attention: S' = λ S + k vᵀ, o = S'ᵀ q, with a fixed decay λ a head (Qin et al. 2024; RetNet before it).

With D[i, j] = λ^(i − j) on and below the diagonal, and L the tokens of a chunk (64 but for a last one), which stand
first in it:

    O  = λ^(i + 1) Q S + (Q Kᵀ ∘ D) V
    S' = λ^L S + (λ^(L − 1 − i) K)ᵀ V

As decays are the layer's own, all powers are made once, in float64; none is above 1. Rows that fill up a chunk have
zero keys and values, and are not among its L: S stays as it is.

The transition of a range is one factor a head, λ^tokens. Where keys rotate, a segment's zero-start state S₀, computed
as if it began at position 0, is used at position p by turning its key channels as a key is turned: a factor commutes
with rotations, so S ← T·S + R(p)·S₀ (HyPIC, equation 7).

N rows of a step, T tokens, n chunks (of any sequences), t = 64 tokens, B decoding sequences, H heads, K width of keys
and values, W = H·K, C = 3W, D model width, P powers of a decay, Q groups of the norm; M = n·H: chunks and heads. Chunks
and states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.layers.lightning import Lightning
from headwater.mixers.activations import inverse_rms
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Linear
from headwater.mixers.products import rows
from headwater.mixers.recurrent import RecurrentMixer, Rows, decayed_by_channel, rank_one_step
from headwater.mixers.rotary import rotary_table, rotate_into
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 16  # chunks × heads whose intermediates fit in cache: several chunks of a small model, 1 of a large


def fixed_decay(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, slope_H: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, the plain form that tests compare chunks and decode steps with.

    Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).
    Lightning Attention-2 (Qin et al. 2024), equation 4, with λ = e^−slope: the state forgets, and k vᵀ is added.
    Queries come scaled.
    """
    g_TH1 = -slope_H.expand(len(q_THK), -1).unsqueeze(-1)
    return decayed_by_channel(q_THK, k_THK, v_THV, g_TH1, state_HKV)


@dataclass(frozen=True)
class Decays:
    """Powers of the decays of a layer's heads."""

    power_PH: Tensor  # λ^p, p = 0 … 64
    attend_Htt: Tensor  # scale · D
    read_Ht1: Tensor  # scale · λ^(i + 1)
    scale: float  # of a query times a key

    @classmethod
    def of(cls, slope_H: Tensor, scale: float) -> Decays:
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

    q_nHtK: Tensor
    attend_nHtt: Tensor  # Q Kᵀ ∘ D, zero above the diagonal
    write_nHtK: Tensor  # λ^(L − 1 − i) k
    v_nHtK: Tensor
    decay_nH: Tensor  # λ^L
    read_Ht1: Tensor  # scale · λ^(i + 1)

    def advance_into(self, at: slice, state_MKK: Tensor, read_MtK: Tensor) -> None:
        """Advance one sequence after the other, with queries and values as they are in the projection's output.

        A copy that makes one batch of several sequences costs more than it saves.
        """
        heads = self.decay_nH.shape[1]
        chunks = range(at.start // heads, at.stop // heads)
        for chunk, state_HKK, read_HtK in zip(chunks, state_MKK.split(heads), read_MtK.split(heads), strict=True):
            v_HtK = self.v_nHtK[chunk]
            torch.bmm(self.q_nHtK[chunk], state_HKK, out=read_HtK)
            read_HtK.mul_(self.read_Ht1).baddbmm_(self.attend_nHtt[chunk], v_HtK)
            state_HKK.mul_(self.decay_nH[chunk, :, None, None]).baddbmm_(self.write_nHtK[chunk].mT, v_HtK)

    def transition_into(self, at: slice, transition_H: Tensor) -> None:
        transition_H.mul_(self.decay_nH.flatten()[at])


def prepare(qkv_nt3HK: Tensor, length_n: Tensor, decays: Decays) -> Chunks:
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
    return Chunks(q_nHtK, attend_nHtt, write_nHtK, v_nHtK, decays.power_PH[length_n], decays.read_Ht1)


def decode_step(qkv_B3HK: Tensor, decays: Decays, state_BHKK: Tensor) -> Tensor:
    """Process one token of each of B sequences: return outputs [B, H, K]; update states (of any stride) in place."""
    q_BHK, k_BHK, v_BHK = qkv_B3HK.unbind(1)
    return rank_one_step(q_BHK * decays.scale, k_BHK, v_BHK, decays.power_PH[1, :, None, None], state_BHKK)


class LightningAttention(RecurrentMixer[Lightning]):
    """The mixer of MiniMax and Ring-linear."""

    def __init__(self, shape: Lightning, weights: Weights) -> None:
        self.shape = shape
        self.qkv_proj = _by_part(shape, weights)
        self.g_proj = weights.linear("g_proj")
        self.out_proj = weights.linear("o_proj")
        slope_H = torch.tensor(shape.slopes, dtype=torch.float64, device=weights.device)
        self.decays = Decays.of(slope_H, shape.scale)
        self.norm_QX = weights.vector("g_norm.weight").unflatten(0, (shape.norm_groups, -1))
        norms = [weights.vector(name) for name in ("q_norm.weight", "k_norm.weight")] if shape.normed else []
        self.qk_norm_21K = torch.stack(norms).unsqueeze(1) if norms else None
        self.rotation = rotary_table(shape.rotary, str(weights.device)) if shape.rotary else None
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)

    def products(self, x_ND: Tensor, batch: StepBatch) -> tuple[Tensor, ...]:
        """Compute [q | k | v], activated, and the output's gate."""
        project = self.qkv_proj.swish if self.shape.activated else self.qkv_proj
        return project(x_ND, batch.n_prefill), self.g_proj.sigmoid(x_ND, batch.n_prefill)

    def without_gate(self, products: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return products[:1]

    def rows(self, products: tuple[Tensor, ...], batch: StepBatch) -> Rows:
        """Place queries and keys; gates are 1 for each token, so that a chunk's sum is its length."""
        mixed_NC, gate_NX = products
        if self.qk_norm_21K is not None or self.rotation is not None:
            mixed_NC = mixed_NC.float()
            self._place_into(mixed_NC[:, : 2 * self.shape.width].unflatten(1, (2, self.shape.heads, -1)), batch)
        return Rows(mixed_NC, torch.ones(len(mixed_NC), device=mixed_NC.device), gate_NX)

    def _place_into(self, qk_N2HK: Tensor, batch: StepBatch) -> None:
        """Norm queries and keys of each head and rotate them, in place, in float32."""
        if self.qk_norm_21K is not None:
            qk_N2HK.mul_(inverse_rms(qk_N2HK, self.shape.norm_eps)).mul_(self.qk_norm_21K)
        if self.rotation is not None:
            rotate_into(qk_N2HK.flatten(1, 2), self.rotation.at(batch.position_N))

    def prepare(self, mixed_ntC: Tensor, gates_ntX: Tensor) -> Chunks:
        return prepare(self._heads(mixed_ntC), gates_ntX.sum(1).long(), self.decays)

    def moved(self, zero_start_X: Tensor, by: int) -> Tensor:
        """Rotate the key channels of a state, as keys rotate."""
        if self.rotation is None:
            return zero_start_X
        turned_HKK = zero_start_X.clone()
        rotate_into(turned_HKK.mT, self.rotation.turn(by))
        return turned_HKK

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_BX: Tensor) -> Tensor:
        return decode_step(self._heads(mixed_BC), self.decays, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: Tensor) -> None:
        """Apply the norm over groups of the width, then the gate."""
        read_nW = read_nX.flatten(1)
        read_nQX = read_nW.unflatten(1, (self.shape.norm_groups, -1))
        read_nQX.mul_(inverse_rms(read_nQX, self.shape.norm_eps)).mul_(self.norm_QX)
        torch.mul(read_nW, rows.z_NX[at], out=rows.out_NX[at])

    def _heads(self, mixed: Tensor) -> Tensor:
        """Split channels into queries, keys and values: [..., 3, H, K]."""
        qkv: Tensor = mixed.unflatten(-1, (3, self.shape.heads, self.shape.head_dim))
        return qkv


def _by_part(shape: Lightning, weights: Weights) -> Linear:
    """Build the projection with outputs [q | k | v], each in the order of heads."""
    if not shape.by_head:
        return weights.linear("qkv_proj")

    row_H3X = torch.arange(3 * shape.width).unflatten(0, (shape.heads, 3, -1))
    rows_N = row_H3X.transpose(0, 1).flatten()
    bias_N = weights.stored("qkv_proj.bias")[rows_N] if shape.bias else None
    return weights.packed(rows(weights.held("qkv_proj.weight"), rows_N), bias_N)

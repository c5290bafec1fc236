"""A Kimi Delta Attention layer: projections, short convolutions, decays by key channel, delta rule, gated norm.

N rows of a step, B decoding sequences, C convolved channels, S sequences of a block, n chunks, t = 64, H heads, K width
of their keys and V of their values (equal), D model width.
"""

from __future__ import annotations

import torch

from headwater.layers.kda import DeltaAttention
from headwater.mixers.activations import inverse_rms, sigmoid, softplus
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.kda.fast import Chunks, advance_into, decode_step, prepare, transition_into
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache


class KimiDeltaAttention(RecurrentMixer[Chunks]):
    """The mixer of Kimi-Linear and of Ling 3.0."""

    def __init__(self, shape: DeltaAttention, weights: Weights) -> None:
        self.shape = shape
        between = ("f_a_proj", "g_a_proj") if shape.low_rank else ("f_proj", "g_proj")
        self.in_proj = weights.linear("q_proj", "k_proj", "v_proj", *between, "b_proj")
        if shape.low_rank:
            self.f_b_proj, self.g_b_proj = weights.linear("f_b_proj"), weights.linear("g_b_proj")
        self.out_proj = weights.linear("o_proj")
        taps = torch.cat([weights.stored(f"{name}_conv1d.weight") for name in "qkv"])
        self.convolution = ShortConvolution(taps.to(weights.device))
        self.rate_X = weights.vector("A_log").exp_().repeat_interleave(shape.head_dim)
        self.dt_bias_X = weights.vector("dt_bias")
        self.norm_V = weights.vector("o_norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)
        self.read_shape = (shape.heads, CHUNK, shape.head_dim)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates [N, H · K + H] are the log decays, then the writing strength, sigmoid(b)."""
        s = self.shape
        between = s.head_dim if s.low_rank else s.width
        mixed_NC, f_NX, z_NX, b_NH = self.in_proj(x_ND, batch.n_prefill).split(
            (3 * s.width, between, between, s.heads), -1
        )
        if s.low_rank:
            f_NX, z_NX = self.f_b_proj(f_NX, batch.n_prefill), self.g_b_proj(z_NX, batch.n_prefill)
        gates_NX = torch.empty(len(x_ND), s.width + s.heads, device=x_ND.device)
        self._log_decays_into(f_NX.float() + self.dt_bias_X, gates_NX[:, : s.width])
        gates_NX[:, s.width :] = sigmoid(b_NH.float())
        z_NHV = z_NX.unflatten(-1, (s.heads, s.head_dim))
        return Rows(mixed_NC, gates_NX, z_NHV, x_ND.new_empty(z_NHV.shape))

    def _log_decays_into(self, f_NX: torch.Tensor, out_NX: torch.Tensor) -> None:
        """Write −e^A softplus(f), or with a lower bound, bound · sigmoid(e^A f). `f_NX` is overwritten."""
        if self.shape.lowest is None:
            torch.mul(softplus(f_NX), self.rate_X, out=out_NX).neg_()
        else:
            torch.mul(sigmoid(f_NX.mul_(self.rate_X)), self.shape.lowest, out=out_NX)

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        return prepare(*self._heads(mixed_ntC), *self._gates(gates_ntX))

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        advance_into(prepared, self._by_head(at), state_SX.flatten(0, 1), read_SX.flatten(0, 1))

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_into(prepared, self._by_head(at), transition_SX.flatten(0, 1))

    def identity(self) -> torch.Tensor:
        """Return the identity as a dense matrix for each head: [H, K, K]."""
        return torch.eye(self.shape.head_dim).repeat(self.shape.heads, 1, 1)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return torch.bmm(transition_X, state_X)

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        return decode_step(*self._heads(mixed_BC), *self._gates(gates_BX), state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        assert rows.z_NX is not None
        normed_nHV = (read_nX * inverse_rms(read_nX, self.shape.norm_eps)).mul_(self.norm_V)
        rows.out_NX[at] = normed_nHV.mul_(sigmoid(rows.z_NX[at].float()))

    def _by_head(self, at: slice) -> slice:
        return slice(at.start * self.shape.heads, at.stop * self.shape.heads)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split channels into queries and keys, [..., 2, H, K], and values, [..., H, V]."""
        qkv = mixed.unflatten(-1, (3, self.shape.heads, self.shape.head_dim))
        return qkv[..., :2, :, :], qkv[..., 2, :, :]

    def _gates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split gates into log decays, [..., H, K], and writing strengths, [..., H]."""
        g, beta = gates.split((self.shape.width, self.shape.heads), -1)
        return g.unflatten(-1, (self.shape.heads, self.shape.head_dim)), beta

"""A layer of gated linear attention: projections, decays by key channel, gated norm.

N rows of a step, B decoding sequences, C channels of queries, keys and values, S sequences of a block, n chunks,
t = 64, H heads, K key width, V value width, D model width.
"""

from __future__ import annotations

import torch

from headwater.layers.gla import GatedLinearAttention
from headwater.mixers.activations import gated_rms_norm, softplus
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.gla.fast import Chunks, advance_into, decode_step, prepare
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache


class GatedLinearAttentionMixer(RecurrentMixer[Chunks]):
    """Gated linear attention as in flash-linear-attention, without its optional convolutions."""

    def __init__(self, shape: GatedLinearAttention, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = weights.linear("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
        self.gate_proj = weights.linear("gk_proj.1")
        self.out_proj = weights.linear("o_proj")
        self.norm_V = weights.vector("g_norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)
        self.read_shape = (shape.heads, CHUNK, shape.v_dim)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates [N, H, K] are the log decays, log sigmoid(gk) / normaliser."""
        s = self.shape
        keys, values = s.heads * s.k_dim, s.heads * s.v_dim
        projected_NE = self.in_proj(x_ND, batch.n_prefill)
        mixed_NC, z_NX, low_NR = projected_NE.split((2 * keys + values, values, s.gate_rank), -1)
        g_NX = softplus(self.gate_proj(low_NR, batch.n_prefill).float().neg_()).div_(-s.normaliser)
        z_NHV = z_NX.unflatten(-1, (s.heads, s.v_dim))
        return Rows(mixed_NC, g_NX.unflatten(-1, (s.heads, s.k_dim)), z_NHV, x_ND.new_empty(z_NHV.shape))

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        return prepare(*self._heads(mixed_ntC), gates_ntX)

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        advance_into(prepared, self._by_head(at), state_SX.flatten(0, 1), read_SX.flatten(0, 1))

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_SX.mul_(prepared.decay_MK1[self._by_head(at)].view(transition_SX.shape))

    def identity(self) -> torch.Tensor:
        """Return the identity as a factor for each key channel: [H, K]."""
        return torch.ones(self.shape.heads, self.shape.k_dim)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return transition_X.unsqueeze(-1) * state_X

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        return decode_step(*self._heads(mixed_BC), gates_BX, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        assert rows.z_NX is not None
        rows.out_NX[at] = gated_rms_norm(read_nX, rows.z_NX[at], self.norm_V, self.shape.norm_eps)

    def _by_head(self, at: slice) -> slice:
        return slice(at.start * self.shape.heads, at.stop * self.shape.heads)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split channels into queries and keys, [..., 2, H, K], and values, [..., H, V]."""
        s = self.shape
        n_qk = 2 * s.heads * s.k_dim
        qk = mixed[..., :n_qk].unflatten(-1, (2, s.heads, s.k_dim))
        return qk, mixed[..., n_qk:].unflatten(-1, (s.heads, s.v_dim))

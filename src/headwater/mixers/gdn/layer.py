"""A Gated DeltaNet layer: projections, short convolution, gates, delta rule, gated norm.

N rows of a step, B decoding sequences, C convolved channels, S sequences of a block, n chunks, t = 64, G key heads,
H value heads, K key width, V value width, D model width.
"""

from __future__ import annotations

import torch

from headwater.layers.gdn import DeltaNet
from headwater.mixers.activations import gated_rms_norm, sigmoid, softplus
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.gdn.fast import Chunks, advance_into, decode_step, prepare, transition_into
from headwater.mixers.linear import Linear
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates fit in cache: 2-4 chunks of a small model, 1 of a large


class GatedDeltaNet(RecurrentMixer[Chunks]):
    """The mixer of Qwen3-Next and Qwen3.5."""

    def __init__(self, shape: DeltaNet, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = fused_projection(shape, weights)
        self.out_proj = weights.linear("out_proj")
        self.convolution = ShortConvolution(weights.stored("conv1d.weight").to(weights.device))
        self.decay_H = weights.vector("A_log").exp_().neg_()
        self.dt_bias_H = weights.vector("dt_bias")
        self.norm_V = weights.vector("norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.v_heads)
        self.read_shape = (shape.v_heads, CHUNK, shape.v_dim)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates [N, 2, H]: the log decay, −e^A softplus(a + dt), and the strength, sigmoid(b)."""
        s = self.shape
        projected_NE = self.in_proj(x_ND, batch.n_prefill)
        widths = (s.channels, s.v_heads * s.v_dim, s.v_heads, s.v_heads)
        mixed_NC, z_NX, b_NH, a_NH = projected_NE.split(widths, -1)
        z_NHV = z_NX.unflatten(-1, (s.v_heads, s.v_dim))
        g_NH = softplus(a_NH.float() + self.dt_bias_H).mul_(self.decay_H)
        gates_N2H = torch.stack((g_NH, sigmoid(b_NH.float())), 1)
        return Rows(mixed_NC, gates_N2H, z_NHV, x_ND.new_empty(z_NHV.shape))

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        return prepare(*self._heads(mixed_ntC), gates_ntX[:, :, 0], gates_ntX[:, :, 1])

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        advance_into(prepared, self._by_head(at), state_SX.flatten(0, 1), read_SX.flatten(0, 1))

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_into(prepared, self._by_head(at), transition_SX.flatten(0, 1))

    def identity(self) -> torch.Tensor:
        """Return the identity as a dense matrix for each head: [H, K, K]."""
        return torch.eye(self.shape.k_dim).repeat(self.shape.v_heads, 1, 1)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return torch.bmm(transition_X, state_X)

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        return decode_step(*self._heads(mixed_BC), gates_BX[:, 0, :, None], gates_BX[:, 1], state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        assert rows.z_NX is not None
        rows.out_NX[at] = gated_rms_norm(read_nX, rows.z_NX[at], self.norm_V, self.shape.norm_eps)

    def _by_head(self, at: slice) -> slice:
        return slice(at.start * self.shape.v_heads, at.stop * self.shape.v_heads)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split channels into queries and keys, [..., 2, G, K], and values, [..., H, V]."""
        s = self.shape
        n_qk = 2 * s.k_heads * s.k_dim
        qk = mixed[..., :n_qk].unflatten(-1, (2, s.k_heads, s.k_dim))
        return qk, mixed[..., n_qk:].unflatten(-1, (s.v_heads, s.v_dim))


def fused_projection(shape: DeltaNet, weights: Weights) -> Linear:
    """Build one product whose outputs are [q | k | v | z | b | a], each in the order of heads.

    Stored key head by key head, rows are q, k, then v and z of the value heads that share it (b and a likewise).
    """
    if not shape.by_key_head:
        return weights.linear(*(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")))
    heads = shape.k_heads
    shared = shape.v_heads // heads
    widths = (shape.k_dim, shape.k_dim, shared * shape.v_dim, shared * shape.v_dim)
    by_head = weights.stored("in_proj_qkvz.weight").unflatten(0, (heads, -1)).split(widths, 1)
    by_head += weights.stored("in_proj_ba.weight").unflatten(0, (heads, -1)).split(shared, 1)
    return weights.packed(torch.cat([part.flatten(0, 1) for part in by_head]))

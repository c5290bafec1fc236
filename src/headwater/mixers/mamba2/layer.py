"""A Mamba-2 layer: projection, short convolution, steps, recurrence, gated norm.

N rows of a step, B decoding sequences, C convolved channels, S sequences of a block, n chunks, t = 64, H heads,
P channels a head, I = H·P, G groups of heads, D model width.
"""

from __future__ import annotations

import torch

from headwater.layers.mamba2 import Mamba2
from headwater.mixers.activations import inverse_rms, silu, softplus
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.mamba2.fast import Chunks, Inputs, advance_into, decode_step, prepare, transition_into
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

HEADS_A_BLOCK = 48  # chunks × heads whose intermediates fit in cache


class StateSpaceDual(RecurrentMixer[Chunks]):
    """The mixer of Granite 4, Bamba, Nemotron-H, Falcon-H1 and of Mamba-2 itself."""

    def __init__(self, shape: Mamba2, weights: Weights) -> None:
        self.shape = shape
        self.in_proj, self.out_proj = weights.linear("in_proj"), weights.linear("out_proj")
        self.convolution = scaled_convolution(shape, weights)
        self.rate_H = weights.vector("A_log").exp_().neg_()
        self.skip_H = weights.vector("D")
        self.dt_bias_H = weights.vector("dt_bias")
        self.norm_I = weights.optional("norm.weight")
        self.chunks_a_block = max(1, HEADS_A_BLOCK // shape.heads)
        self.read_shape = (shape.heads, CHUNK, shape.head_dim)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates [N, H] are the steps dt."""
        s = self.shape
        projected_NE = self.in_proj(x_ND, batch.n_prefill)
        z_NI, mixed_NC, dt_NH = projected_NE.split((s.inner, s.channels, s.heads), -1)
        step_NH = softplus(dt_NH.float() * s.scales[-1] + self.dt_bias_H).clamp_(*s.step_limits)
        return Rows(mixed_NC, step_NH, z_NI, torch.empty_like(z_NI, memory_format=torch.contiguous_format))

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        return prepare(self._inputs(mixed_ntC, gates_ntX), self.rate_H, self.skip_H)

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        advance_into(prepared, self._by_head(at), state_SX.flatten(0, 1), read_SX.flatten(0, 1))

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_into(prepared, self._by_head(at), transition_SX.view(-1))

    def identity(self) -> torch.Tensor:
        """Return the identity as a factor for each head: [H]."""
        return torch.ones(self.shape.heads)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return transition_X[:, None, None] * state_X

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        given = self._inputs(mixed_BC.unsqueeze(1), gates_BX.unsqueeze(1))
        return decode_step(given, self.rate_H, self.skip_H, state_BX)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        """Apply the output's gate, and the norm of each group before or after it."""
        assert rows.z_NX is not None
        s, z_nI = self.shape, rows.z_NX[at].float()
        gate_nI = silu(z_nI if s.scales[0] == 1.0 else z_nI * s.scales[0])
        if s.normed and s.norm_first:
            rows.out_NX[at] = self._norm_(read_nX.flatten(1)).mul_(gate_nI)
            return
        gate_nI.unflatten(-1, (s.heads, s.head_dim)).mul_(read_nX)
        rows.out_NX[at] = self._norm_(gate_nI) if s.normed else gate_nI

    def _norm_(self, y_nI: torch.Tensor) -> torch.Tensor:
        """Norm the channels of each group, in place."""
        y_nGX = y_nI.unflatten(-1, (self.shape.groups, -1))
        y_nGX.mul_(inverse_rms(y_nGX, self.shape.norm_eps))
        assert self.norm_I is not None
        return y_nI.mul_(self.norm_I)

    def _by_head(self, at: slice) -> slice:
        return slice(at.start * self.shape.heads, at.stop * self.shape.heads)

    def _inputs(self, mixed_ntC: torch.Tensor, dt_ntH: torch.Tensor) -> Inputs:
        """Split channels into x, B and C."""
        s = self.shape
        x_ntI, b_ntX, c_ntX = mixed_ntC.split((s.inner, s.groups * s.state, s.groups * s.state), -1)
        b_ntGN, c_ntGN = (t.unflatten(-1, (s.groups, s.state)) for t in (b_ntX, c_ntX))
        return Inputs(x_ntI.unflatten(-1, (s.heads, s.head_dim)), dt_ntH, b_ntGN, c_ntGN)


def scaled_convolution(shape: Mamba2, weights: Weights) -> ShortConvolution:
    """Build the convolution of x, B and C, with their scales multiplied into the taps."""
    widths = torch.tensor((shape.inner, shape.groups * shape.state, shape.groups * shape.state))
    scale_C11 = torch.tensor(shape.scales[1:4]).repeat_interleave(widths)[:, None, None].to(weights.device)
    bias_C = weights.optional("conv1d.bias")
    return ShortConvolution(weights.vector("conv1d.weight") * scale_C11, bias_C)

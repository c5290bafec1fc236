"""A Mamba-1 layer: projection, short convolution, steps and their B and C, selective scan, output gate.

N rows of a step, E states a channel, C channels, n chunks, t = 64 tokens, B decoding sequences, S sequences of a block,
R channels of the step's projection, D model width, X any leading dimensions.
"""

from __future__ import annotations

import torch

from headwater.layers.mamba import Mamba
from headwater.mixers.activations import LOG2_E, RMSNorm, silu, softplus
from headwater.mixers.batch import CHUNK, StepBatch
from headwater.mixers.convolution import ShortConvolution
from headwater.mixers.mamba.fast import Chunks, advance_into, decay, decode_step, prepare, transition_into
from headwater.mixers.recurrent import RecurrentMixer, Rows
from headwater.mixers.weights import Weights

ELEMENTS_A_BLOCK = 1 << 18  # tokens × channels whose steps and the like stay in cache


class SelectiveStateSpace(RecurrentMixer[Chunks]):
    """The mixer of Mamba and Jamba. States stand [E, C]: channels last, as the scan runs over them."""

    def __init__(self, shape: Mamba, weights: Weights) -> None:
        self.shape = shape
        self.in_proj = weights.linear("in_proj")
        self.out_proj = weights.linear("out_proj")
        self.convolution = ShortConvolution(
            weights.stored("conv1d.weight").to(weights.device), weights.optional("conv1d.bias")
        )
        self.x_proj = weights.linear("x_proj")
        self.dt_proj = weights.packed(weights.stored("dt_proj.weight"))
        self.dt_bias_C = weights.vector("dt_proj.bias")  # added in float32, also in a bfloat16 model
        self.log2_rate_EC = weights.vector("A_log").exp_().mul_(-LOG2_E).T.contiguous()
        self.skip_C = weights.vector("D")
        self.norms = _norms(shape, weights)
        self.chunks_a_block = max(1, ELEMENTS_A_BLOCK // (CHUNK * shape.inner))
        self.read_shape = (CHUNK, shape.inner)

    def project(self, x_ND: torch.Tensor, batch: StepBatch) -> Rows:
        """Compute projections; gates are 1 for tokens and 0 for padding, whose step must be zero."""
        mixed_NC, z_NC = self.in_proj(x_ND, batch.n_prefill).chunk(2, -1)
        ones_N1 = torch.ones(len(x_ND), 1, device=x_ND.device)
        return Rows(mixed_NC, ones_N1, z_NC, torch.empty_like(z_NC, memory_format=torch.contiguous_format))

    def prepare(self, mixed_ntC: torch.Tensor, gates_ntX: torch.Tensor) -> Chunks:
        dt_ntC, b_ntE, c_ntE = self._steps(mixed_ntC, prefill=True)
        return prepare(mixed_ntC, dt_ntC.mul_(gates_ntX), b_ntE, c_ntE, self.skip_C)

    def advance_into(self, prepared: Chunks, at: slice, state_SX: torch.Tensor, read_SX: torch.Tensor) -> None:
        advance_into(prepared, at, self.log2_rate_EC, state_SX, read_SX)

    def transition_into(self, prepared: Chunks, at: slice, transition_SX: torch.Tensor) -> None:
        transition_into(prepared, at, transition_SX)

    def identity(self) -> torch.Tensor:
        """Return the identity as a sum of no steps, [C]: a state is multiplied by e^(A sum)."""
        return torch.zeros(self.shape.inner)

    def carried(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        return decay(transition_X[None], self.log2_rate_EC)[0].mul_(state_X)

    def decode(self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_BX: torch.Tensor) -> torch.Tensor:
        dt_BC, b_BE, c_BE = self._steps(mixed_BC, prefill=False)
        read_BC = decode_step(dt_BC * mixed_BC, b_BE, c_BE, decay(dt_BC, self.log2_rate_EC), state_BX)
        return torch.addcmul(read_BC, mixed_BC, self.skip_C)

    def finish_into(self, rows: Rows, at: slice, read_nX: torch.Tensor) -> None:
        assert rows.z_NX is not None
        rows.out_NX[at] = silu(rows.z_NX[at].float()).mul_(read_nX)

    def by_token(self, read_X: torch.Tensor) -> torch.Tensor:
        return read_X

    def _steps(self, mixed_XC: torch.Tensor, prefill: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute steps [X, C], and B and C [X, E], in float32, from the convolved channels."""
        s = self.shape
        leading = mixed_XC.shape[:-1]
        mixed_NC = mixed_XC.flatten(0, -2).to(self.x_proj.dtype)
        n_prefill = len(mixed_NC) if prefill else 0
        widths = (s.step_rank, s.state, s.state)
        parts = self.x_proj(mixed_NC, n_prefill).split(widths, -1)
        dt_NR, b_NE, c_NE = (
            p.float() if norm is None else norm(p).float() for p, norm in zip(parts, self.norms, strict=True)
        )
        dt_NC = self.dt_proj(dt_NR.to(self.dt_proj.dtype), n_prefill).float()
        dt_NC = softplus(dt_NC.add_(self.dt_bias_C))
        return tuple(t.unflatten(0, leading) for t in (dt_NC, b_NE, c_NE))


def _norms(shape: Mamba, weights: Weights) -> tuple[RMSNorm | None, ...]:
    """Build the norms of the step's channels, B and C, or three times None."""
    if not shape.normed:
        return (None,) * 3
    norms = []
    for name, width in (("dt", shape.step_rank), ("b", shape.state), ("c", shape.state)):
        weight_W = weights.optional(f"{name}_layernorm.weight")
        ones_W = torch.ones(width, device=weights.device)
        norms.append(RMSNorm(ones_W if weight_W is None else weight_W, shape.norm_eps))
    return tuple(norms)

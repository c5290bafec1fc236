"""Routed experts of decoding rows in Triton, without a count of the rows of each expert.

Each row reads its experts' weights by itself, so its bits depend only on the row, and the launch only on the number of
rows. Prefill, in which many rows share an expert, is computed expert by expert.

R rows times experts a row, J experts a row, E experts, K inputs and N outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.layers.feed_forward import CLAMPED_SWIGLU, Experts
from headwater.mixers.activations import ACTIVATIONS, clamped_swiglu, limited_
from headwater.mixers.feed_forward import MixtureOfExperts, expert_biases, names_of, parts_of
from headwater.mixers.gpu import dense
from headwater.mixers.weights import Weights

OUTPUTS, INPUTS = 32, 64  # of a tile


@triton.jit(do_not_specialize=["rows_of_x"])
def _product(
    x, weight, bias, expert_R, out, n_in, n_out, rows_of_x,
    biased: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * outputs + tl.arange(0, outputs)
    of_expert = weight + tl.load(expert_R + row) * n_out * n_in
    total = tl.zeros((outputs,), tl.float32)
    for block in range(tl.cdiv(n_in, inputs)):
        k = block * inputs + tl.arange(0, inputs)
        x_K = tl.load(x + row // rows_of_x * n_in + k, mask=k < n_in, other=0.0).to(tl.float32)
        inside = (n < n_out)[:, None] & (k < n_in)[None, :]
        w_NK = tl.load(of_expert + n[:, None] * n_in + k[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(w_NK * x_K[None, :], 1)
    if biased:
        total += tl.load(bias + tl.load(expert_R + row) * n_out + n, mask=n < n_out, other=0.0)
    tl.store(out + row * n_out + n, total.to(out.dtype.element_ty), mask=n < n_out)


def routed_product(x: Tensor, weight_ENK: Tensor, expert_R: Tensor, bias_EN: Tensor | None = None) -> Tensor:
    """Multiply each row by its expert's weight, [R, N]; successive entries of `expert_R` may share a row of x."""
    n_out, n_in = weight_ENK.shape[1:]
    out_RN = x.new_empty(len(expert_R), n_out)
    _product[len(expert_R), triton.cdiv(n_out, OUTPUTS)](
        dense(x), weight_ENK, bias_EN, expert_R, out_RN, n_in, n_out, len(expert_R) // len(x),
        biased=bias_EN is not None, outputs=OUTPUTS, inputs=INPUTS,
    )  # fmt: skip
    return out_RN


@dataclass(frozen=True, kw_only=True)
class ExpertsOnGpu(MixtureOfExperts):
    """Routed experts whose decoding rows run in Triton; weights are held twice, packed and stacked."""

    stacked: tuple[Tensor, ...]  # [E, N, K] each: of gates if experts have them, up and down
    biases: tuple[Tensor | None, ...]  # [E, N] each, float32
    activation: str

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> ExpertsOnGpu:
        """Pack the weights, and keep those of routed experts stacked on the device."""
        stored = [weights.stored(f"experts.{name}.weight") for name in names_of(shape.expert)]
        stacked = tuple(weights.cast(tensor).contiguous() for tensor in stored)
        parts = parts_of(shape, weights, [list(tensor.unbind(0)) for tensor in stacked])
        biases = tuple(expert_biases(shape, weights))
        return cls(**parts, stacked=stacked, biases=biases, activation=shape.activation)

    def run(self, x_NX: Tensor, expert_NJ: Tensor, n_prefill: int) -> Tensor:
        """Send each token through each of its experts, [N, J, X]; decoding rows by the kernel."""
        if n_prefill == len(x_NX):
            return super().run(x_NX, expert_NJ, n_prefill)
        decoded_BJX = self._decoded(x_NX[n_prefill:], expert_NJ[n_prefill:])
        if n_prefill == 0:
            return decoded_BJX
        return torch.cat([super().run(x_NX[:n_prefill], expert_NJ[:n_prefill], n_prefill), decoded_BJX])

    def _decoded(self, x_BX: Tensor, expert_BJ: Tensor) -> Tensor:
        expert_R, limit = expert_BJ.flatten(), self.router.shape.limit

        def product(x: Tensor, at: int) -> Tensor:
            return routed_product(x, self.stacked[at], expert_R, self.biases[at])

        hidden_RI = product(x_BX, -2)
        if not self.router.shape.gated:
            hidden_RI = ACTIVATIONS[self.activation](hidden_RI)
        elif self.activation == CLAMPED_SWIGLU:
            hidden_RI = clamped_swiglu(product(x_BX, 0), hidden_RI, limit)
        else:
            opened_RI = ACTIVATIONS[self.activation](product(x_BX, 0))
            hidden_RI = limited_(opened_RI, hidden_RI, limit) if limit else hidden_RI.mul_(opened_RI)
        return product(hidden_RI, -1).view(*expert_BJ.shape, -1)

"""Decoding rows through the experts that they chose, in Triton: nobody asks how many rows an expert has.

Each row reads its experts' weights by itself, so its bits depend on it alone, and what is launched on the number of
rows. Prefill, where many rows share an expert, goes expert by expert.

R rows times experts a row, J experts a row, E experts, K inputs and N outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headwater.mixers.activations import ACTIVATIONS

OUTPUTS, INPUTS = 32, 64  # of a tile


@triton.jit
def _product(
    x, weight, expert_R, out, n_in, n_out, rows_of_x, outputs: tl.constexpr, inputs: tl.constexpr
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
    tl.store(out + row * n_out + n, total.to(out.dtype.element_ty), mask=n < n_out)


def routed_product(x: torch.Tensor, weight_ENK: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
    """[R, N]: each row times its expert's weight; successive rows of `expert_R` may share one of x."""
    n_out, n_in = weight_ENK.shape[1:]
    out_RN = x.new_empty(len(expert_R), n_out)
    _product[len(expert_R), triton.cdiv(n_out, OUTPUTS)](
        x.contiguous(), weight_ENK, expert_R, out_RN, n_in, n_out, len(expert_R) // len(x),
        outputs=OUTPUTS, inputs=INPUTS,
    )  # fmt: skip
    return out_RN


@dataclass(frozen=True)
class StackedExperts:
    """The weights of all experts of a layer, [E, N, K] each; without a gate where experts have none."""

    gate_ENK: torch.Tensor | None
    up_ENK: torch.Tensor
    down_ENK: torch.Tensor
    activation: str

    def forward(self, x_NX: torch.Tensor, expert_NJ: torch.Tensor) -> torch.Tensor:
        """Each row through each of its experts, [N, J, X]."""
        expert_R = expert_NJ.flatten()
        hidden_RI, activate = routed_product(x_NX, self.up_ENK, expert_R), ACTIVATIONS[self.activation]
        if self.gate_ENK is None:
            hidden_RI = activate(hidden_RI)
        else:
            hidden_RI.mul_(activate(routed_product(x_NX, self.gate_ENK, expert_R)))
        return routed_product(hidden_RI, self.down_ENK, expert_R).view(*expert_NJ.shape, -1)

"""Activations, and the norms of Gated DeltaNet, whose bits depend on an element (or its row) alone.

Torch's own fp32 `silu`, `softplus` and `gelu` have a vector body and a scalar tail that disagree in the last bit, so a
result would depend on the width and on how threads split it. `exp`, `log1p`, `rsqrt` and arithmetic do not, and
everything here is made of those. All of it computes in fp32 and rounds once, to the dtype of its input.

R rows, D width.
"""

from __future__ import annotations

import math

import torch

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _one_plus_exp_neg(x: torch.Tensor) -> torch.Tensor:
    """1 + e^-x in new fp32 memory: infinite where e^-x overflows, which a division by it turns into 0."""
    return torch.neg(x.float()).exp_().add_(1.0)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _one_plus_exp_neg(x).reciprocal_().to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x)."""
    denominator = _one_plus_exp_neg(x)
    return torch.div(x.float(), denominator, out=denominator).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), written so that neither end overflows: max(x, 0) + log1p(e^-|x|)."""
    x_f = x.float()
    return x_f.abs().neg_().exp_().log1p_().add_(x_f.clamp_min(0.0)).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x/2 · (1 + tanh u) = x · sigmoid(2u) with u = √(2/π)(x + 0.044715 x³) (Hendrycks and Gimpel, 2016)."""
    x_f = x.float()
    twice_u = (x_f * x_f).mul_(0.044715).add_(1.0).mul_(x_f).mul_(2.0 * SQRT_2_OVER_PI)
    denominator = _one_plus_exp_neg(twice_u)
    return torch.div(x_f, denominator, out=denominator).to(x.dtype)


def gated_rms_norm(x_RD: torch.Tensor, gate_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · w · silu(gate), in fp32: norm before gate, as Gated DeltaNet has it."""
    mean_R1 = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True).square_().div_(x_RD.shape[-1])
    return (x_RD * mean_R1.add_(eps).rsqrt_()).mul_(weight_D).mul_(silu(gate_RD.float()))


def inverse_l2(x_RD: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """1 / √(Σx² + eps) over the last dimension of fp32 rows; R 1."""
    return torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()

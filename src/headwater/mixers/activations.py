"""Activations, and the norms of Gated DeltaNet, whose bits depend on an element (or its row) alone.

Torch's own fp32 `silu`, `sigmoid`, `softplus` and `exp2` (a third of the time of `exp`) have a vector body and a scalar
tail that disagree in the last bit, so a result would depend on the width and on how threads split it. `exp`, `log1p`,
`rsqrt` and arithmetic do not, and everything here is made of those. All of it computes in fp32 and rounds once, to the
dtype of its input.

R rows, D width.
"""

from __future__ import annotations

import torch


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


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)² (So et al. 2021, section 3)."""
    return x.float().clamp_min(0.0).square_().to(x.dtype)


ACTIVATIONS = {"silu": silu, "relu2": relu2}  # those that config files name


def gated_rms_norm(x_RD: torch.Tensor, gate_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · w · silu(gate), in fp32: norm before gate, as Gated DeltaNet has it."""
    return (x_RD * inverse_rms(x_RD, eps)).mul_(weight_D).mul_(silu(gate_RD.float()))


def inverse_rms(x_RD: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / √(mean(x²) + eps) over the last dimension of fp32 rows; R 1.

    The norm needs no squared copy of x: at 2,048 rows of 512 it takes 0.14 ms where `pow(2).mean()` takes 2.3.
    """
    mean_R1 = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True).square_().div_(x_RD.shape[-1])
    return mean_R1.add_(eps).rsqrt_()


def inverse_l2(x_RD: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """1 / √(Σx² + eps) over the last dimension of fp32 rows; R 1."""
    return torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()

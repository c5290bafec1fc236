"""The short causal convolution and its SiLU, differentiable.

Whole in one function of its own, with rows of zeros that are there in memory: code that is fused with masks in place of
them takes four times as long.

B sequences, T tokens of each, X channels, n taps.
"""

from __future__ import annotations

from typing import Any

import torch


def summed(padded_BTX: torch.Tensor, weight_nX: torch.Tensor) -> torch.Tensor:
    """Rows [B, T, X] of rows [B, T + n − 1, X]."""
    taps = weight_nX.shape[0]
    length = padded_BTX.shape[1] - taps + 1
    total_BTX = padded_BTX[:, :length] * weight_nX[0]
    for tap in range(1, taps):
        total_BTX = total_BTX + padded_BTX[:, tap : tap + length] * weight_nX[tap]
    return total_BTX


def activated(padded_BTX: torch.Tensor, weight_nX: torch.Tensor) -> torch.Tensor:
    total_BTX = summed(padded_BTX, weight_nX)
    return total_BTX * total_BTX.sigmoid()


def before_activation(grad_BTX: torch.Tensor, padded_BTX: torch.Tensor, weight_nX: torch.Tensor) -> torch.Tensor:
    """The gradient of the sums."""
    total_BTX = summed(padded_BTX, weight_nX)
    sigmoid_BTX = total_BTX.sigmoid()
    return grad_BTX * sigmoid_BTX * (1 + total_BTX * (1 - sigmoid_BTX))


def of_weights(grad_BTX: torch.Tensor, padded_BTX: torch.Tensor, taps: int) -> torch.Tensor:
    """[n, X]"""
    length = grad_BTX.shape[1] - taps + 1
    grad_BTX = grad_BTX[:, :length]
    return torch.stack([(grad_BTX * padded_BTX[:, tap : tap + length]).sum(1).sum(0) for tap in range(taps)])


def padded(x_BTX: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """With rows of zeros at both ends, in the weights' precision."""
    batch, length, channels = x_BTX.shape
    dtype = torch.promote_types(x_BTX.dtype, torch.float32)
    out = torch.zeros(batch, before + length + after, channels, dtype=dtype, device=x_BTX.device)
    out[:, before : before + length] = x_BTX
    return out


class ShortConvolution(torch.autograd.Function):
    """silu(Σ_i weight[i] x[t − n + 1 + i]) of rows x [B, T, X] and weights [n, X]; rows before the first are zeros."""

    @staticmethod
    def forward(ctx: Any, x_BTX: torch.Tensor, weight_nX: torch.Tensor) -> torch.Tensor:
        padded_BTX = padded(x_BTX, len(weight_nX) - 1, 0)
        ctx.save_for_backward(padded_BTX, weight_nX)
        ctx.dtype = x_BTX.dtype
        return activated(padded_BTX, weight_nX)

    @staticmethod
    def backward(ctx: Any, grad_BTX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        padded_BTX, weight_nX = ctx.saved_tensors
        taps = len(weight_nX)
        grad_BTX = padded(before_activation(grad_BTX, padded_BTX, weight_nX), 0, taps - 1)
        return summed(grad_BTX, weight_nX.flip(0)).to(ctx.dtype), of_weights(grad_BTX, padded_BTX, taps)

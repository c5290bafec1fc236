"""Muon: momentum whose matrices are made orthogonal, for products with weights; AdamW for all other parameters.

Keller Jordan and others, 2024 ("Muon: an optimizer for hidden layers in neural networks"); the scale by shape follows
Bernstein's derivation in the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# of the quintic x ← a x + b (x xᵀ) x + c (x xᵀ)² x, whose slope at zero is steepest while it stays within bounds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonal(matrix_MN: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ: singular values come to lie near 1."""
    a, b, c = COEFFICIENTS
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = (matrix_MN.mT if tall else matrix_MN).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix_MN.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then `orthogonal`. Takes matrices only."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(velocity, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)

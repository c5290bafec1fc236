"""Muon: momentum whose matrices are made orthogonal, for products with weights; AdamW for all other parameters.

Keller Jordan and others, 2024 ("Muon: an optimizer for hidden layers in neural networks"); the scale by shape follows
Bernstein's derivation in the same text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# of the quintic x ← a x + b (x xᵀ) x + c (x xᵀ)² x, whose slope at zero is steepest while it stays within bounds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonal(matrix_LMN: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """About U Vᵀ of the singular value decompositions U S Vᵀ: singular values come to lie near 1."""
    a, b, c = COEFFICIENTS
    tall = matrix_LMN.shape[-2] > matrix_LMN.shape[-1]
    x = (matrix_LMN.mT if tall else matrix_LMN).bfloat16().contiguous()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix_LMN.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then `orthogonal`, of all matrices of one shape at once."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for weights in by_shape.values():
                self._update(weights, **{name: group[name] for name in ("lr", "momentum", "decay")})

    def _update(self, weights: list[nn.Parameter], lr: float, momentum: float, decay: float) -> None:
        for weight in weights:
            self.state[weight].setdefault("velocity", torch.zeros_like(weight))
        velocity = [self.state[weight]["velocity"] for weight in weights]
        gradient = [weight.grad for weight in weights]
        torch._foreach_lerp_(velocity, gradient, 1 - momentum)
        updates = orthogonal(torch.stack(torch._foreach_lerp(gradient, velocity, momentum)))
        rows, columns = weights[0].shape
        torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_add_(weights, updates.unbind(), alpha=-lr * max(1.0, rows / columns) ** 0.5)

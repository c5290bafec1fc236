"""MLPs, with a gate and without.

Shapes: N rows of a step, C model width, I intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.layers.feed_forward import Mlp
from headwater.mixers.activations import ACTIVATIONS
from headwater.mixers.linear import Linear
from headwater.mixers.weights import Weights


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(scale · gate(x)) · up(x))."""

    gate: Linear  # C -> I
    up: Linear  # C -> I
    down: Linear  # I -> C
    activation: str = "silu"
    gate_scale: float = 1.0

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        return self.down(self.up.times(x_NC, self._opened(x_NC, n_prefill), n_prefill), n_prefill)

    def _opened(self, x_NC: torch.Tensor, n_prefill: int) -> torch.Tensor:
        if self.activation == "silu" and self.gate_scale == 1.0:
            return self.gate.swish(x_NC, n_prefill)
        return ACTIVATIONS[self.activation](self.gate(x_NC, n_prefill).mul_(self.gate_scale))


@dataclass(frozen=True)
class PlainMlp:
    """down(activation(up(x)))."""

    up: Linear  # C -> I
    down: Linear  # I -> C
    activation: str

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        if self.activation == "silu":
            return self.down(self.up.swish(x_NC, n_prefill), n_prefill)
        return self.down(ACTIVATIONS[self.activation](self.up(x_NC, n_prefill)), n_prefill)


AnyMlp = GatedMlp | PlainMlp


def mlp_of(shape: Mlp, weights: Weights) -> AnyMlp:
    """The one that the shape asks for."""
    if shape.gated:
        products = (weights.linear(name) for name in ("gate_proj", "up_proj", "down_proj"))
        return GatedMlp(*products, shape.activation, shape.gate_scale)
    return PlainMlp(weights.linear("up_proj"), weights.linear("down_proj"), shape.activation)

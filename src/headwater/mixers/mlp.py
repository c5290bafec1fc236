"""Gated MLP.

Shapes: N rows of a step, C model width, I intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.layers.feed_forward import Mlp
from headwater.mixers.linear import Linear
from headwater.mixers.weights import Weights


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    gate: Linear  # C -> I
    up: Linear  # C -> I
    down: Linear  # I -> C

    @classmethod
    def of(cls, shape: Mlp, weights: Weights) -> GatedMlp:
        return cls(*(weights.linear(name) for name in ("gate_proj", "up_proj", "down_proj")))

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        return self.down(self.up.times(x_NC, self.gate.swish(x_NC, n_prefill), n_prefill), n_prefill)

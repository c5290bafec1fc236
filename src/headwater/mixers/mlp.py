"""Gated MLP.

Shapes: N rows of a step, C model width, I intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.mixers.linear import Linear


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    gate: Linear  # C -> I
    up: Linear  # C -> I
    down: Linear  # I -> C

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        return self.down(self.up.times(x_NC, self.gate.swish(x_NC, n_prefill), n_prefill), n_prefill)

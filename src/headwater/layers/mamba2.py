"""Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class Mamba2(Layer):
    """Mamba-2 (Dao & Gu 2024): decay (1), rank-one update and C h (2 each); `groups` of heads share B and C."""

    kind: ClassVar[str] = "mamba2"
    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    normed: bool = True  # a gated norm stands before the output

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def tensors(self) -> Shapes:
        shapes: Shapes = {
            "in_proj.weight": (self.inner + self.channels + self.heads, self.hidden),
            "conv1d.weight": (self.channels, 1, self.conv),
            "conv1d.bias": (self.channels,),
            "A_log": (self.heads,),
            "D": (self.heads,),
            "dt_bias": (self.heads,),
            "out_proj.weight": (self.hidden, self.inner),
        }
        return shapes | ({"norm.weight": (self.inner,)} if self.normed else {})

    @property
    def flops(self) -> PrefillFlops:
        recurrence = 5 * self.inner * self.state + 2 * self.channels * self.conv
        return PrefillFlops(2 * self.product_weights + recurrence, 0)

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (
            ("recurrent", (self.heads, self.head_dim, self.state)),
            ("conv", (self.channels, self.conv - 1)),
        )

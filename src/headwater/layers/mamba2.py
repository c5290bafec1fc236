"""Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class Mamba2(Layer):
    """Mamba-2 (Dao & Gu 2024): decay (1), rank-one update and C h (2 each); `groups` of heads share B and C.

    The projection's outputs have the order z (the output's gate), x, B, C, dt.
    """

    kind: ClassVar[str] = "mamba2"
    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    normed: bool = True  # the output has an RMS norm, of each group's channels apart
    conv_bias: bool = True
    bias: bool = False  # of the projection in
    out_bias: bool = False
    norm_first: bool = False  # the gate comes after the norm, not before it
    norm_eps: float = 1e-5
    step_limits: tuple[float, float] = (0.0, float("inf"))  # dt, after its softplus, is kept within them
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # of z, x, B, C, dt as projected

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def tensors(self) -> Shapes:
        projected = self.inner + self.channels + self.heads
        shapes: Shapes = {
            "in_proj.weight": (projected, self.hidden),
            "conv1d.weight": (self.channels, 1, self.conv),
            "A_log": (self.heads,),
            "D": (self.heads,),
            "dt_bias": (self.heads,),
            "out_proj.weight": (self.hidden, self.inner),
        }
        vectors = {
            "norm.weight": (self.normed, self.inner),
            "conv1d.bias": (self.conv_bias, self.channels),
            "in_proj.bias": (self.bias, projected),
            "out_proj.bias": (self.out_bias, self.hidden),
        }
        return shapes | {name: (n,) for name, (has, n) in vectors.items() if has}

    def quantised(self) -> Shapes:
        """Return the weights that may be quantised; of the projection in, not the rows of the steps, which are last."""
        shapes = Layer.quantised(self)
        rows, *inputs = shapes.get("in_proj.weight", (0,))
        return shapes | ({"in_proj.weight": (rows - self.heads, *inputs)} if rows else {})

    @property
    def token_flops(self) -> int:
        return 5 * self.inner * self.state + 2 * self.channels * self.conv

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ("recurrent", (self.heads, self.state, self.head_dim)), ("conv", (self.channels, self.conv - 1))

    @property
    def draft_elements(self) -> int:
        return self.inner + self.channels + self.heads

    @property
    def tail_elements(self) -> int:
        return self.channels + self.heads

    @property
    def transition(self) -> tuple[int, ...]:
        """A factor for each head."""
        return (self.heads,)

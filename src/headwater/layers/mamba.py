"""Mamba-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class Mamba(Layer):
    """Mamba-1 (Gu & Dao 2023): step times A, decay, step times x times B, sum (4), and C h (2)."""

    kind: ClassVar[str] = "mamba"
    kept: ClassVar[frozenset[str]] = frozenset({"x_proj", "dt_proj"})
    inner: int
    state: int
    conv: int
    step_rank: int  # channels between the two projections of the step
    conv_bias: bool = True
    bias: bool = False  # of the projections in and out
    normed: bool = False  # the step's channels, B and C have norms of their own (Jamba)
    norm_eps: float = 1e-6
    norm_weights: bool = True  # of those norms; without, they scale rows to a root mean square of 1 (Falcon Mamba)

    def tensors(self) -> Shapes:
        shapes: Shapes = {
            "in_proj.weight": (2 * self.inner, self.hidden),
            "conv1d.weight": (self.inner, 1, self.conv),
            "x_proj.weight": (self.step_rank + 2 * self.state, self.inner),
            "dt_proj.weight": (self.inner, self.step_rank),
            "dt_proj.bias": (self.inner,),
            "A_log": (self.inner, self.state),
            "D": (self.inner,),
            "out_proj.weight": (self.hidden, self.inner),
        }
        if self.conv_bias:
            shapes["conv1d.bias"] = (self.inner,)
        if self.bias:
            shapes |= {"in_proj.bias": (2 * self.inner,), "out_proj.bias": (self.hidden,)}
        if self.normed and self.norm_weights:
            widths = {"dt": self.step_rank, "b": self.state, "c": self.state}
            shapes |= {f"{name}_layernorm.weight": (width,) for name, width in widths.items()}
        return shapes

    @property
    def token_flops(self) -> int:
        return self.inner * (6 * self.state + 2 * self.conv)

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Channels stand last in the recurrent one: the scan runs over them."""
        return ("recurrent", (self.state, self.inner)), ("conv", (self.inner, self.conv - 1))

    @property
    def draft_elements(self) -> int:
        return 2 * self.inner

    @property
    def tail_elements(self) -> int:
        return self.inner

    @property
    def transition(self) -> tuple[int, ...]:
        """A sum of steps for each channel, by which each of its states decays at its own rate."""
        return (self.inner,)

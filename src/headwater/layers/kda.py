"""Kimi Delta Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class DeltaAttention(Layer):
    """Kimi Delta Attention (Kimi Linear, 2025): Gated DeltaNet with a decay for each key channel.

    Decay and output gate are each made by two projections with `head_dim` channels between them, or by one.
    """

    kind: ClassVar[str] = "delta_attention"
    kept: ClassVar[frozenset[str]] = frozenset({"f_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj"})
    heads: int
    head_dim: int
    conv: int
    norm_eps: float = 1e-5
    low_rank: bool = True  # two projections
    lowest: float | None = None  # what the logarithm of a decay cannot fall below (Ling 3.0); None: nothing

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tensors(self) -> Shapes:
        hidden, width = self.hidden, self.width
        shapes: Shapes = {f"{name}_proj.weight": (width, hidden) for name in "qkv"}
        shapes |= {f"{name}_conv1d.weight": (width, 1, self.conv) for name in "qkv"}
        for name in "fg":  # the decay's and the output gate's
            if self.low_rank:
                shapes[f"{name}_a_proj.weight"] = (self.head_dim, hidden)
                shapes[f"{name}_b_proj.weight"] = (width, self.head_dim)
            else:
                shapes[f"{name}_proj.weight"] = (width, hidden)
        return shapes | {
            "b_proj.weight": (self.heads, hidden),
            "A_log": (self.heads,),
            "dt_bias": (width,),
            "o_norm.weight": (self.head_dim,),
            "o_proj.weight": (hidden, width),
        }

    @property
    def token_flops(self) -> int:
        return 7 * self.width * self.head_dim + 6 * self.width * self.conv

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ("recurrent", (self.heads, self.head_dim, self.head_dim)), ("conv", (3 * self.width, self.conv - 1))

    @property
    def draft_elements(self) -> int:
        return 5 * self.width + self.heads

    @property
    def tail_elements(self) -> int:
        return 4 * self.width + self.heads

    @property
    def transition(self) -> tuple[int, ...]:
        """Dense: a matrix over the keys' channels for each head."""
        return (self.heads, self.head_dim, self.head_dim)

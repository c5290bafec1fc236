"""Linear attention with a fixed decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class Lightning(Layer):
    """Linear attention with one fixed decay a head (Qin et al. 2024): decay (1), rank-one update and S^T q (2 each)."""

    kind: ClassVar[str] = "lightning"
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tensors(self) -> Shapes:
        shapes: Shapes = {
            f"{name}.weight": (self.width, self.hidden) for name in ("q_proj", "k_proj", "v_proj", "g_proj")
        }
        return shapes | {
            "q_norm.weight": (self.head_dim,),
            "k_norm.weight": (self.head_dim,),
            "g_norm.weight": (self.width,),
            "o_proj.weight": (self.hidden, self.width),
        }

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self.product_weights + 5 * self.width * self.head_dim, 0)

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("recurrent", (self.heads, self.head_dim, self.head_dim)),)

"""Gated linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class GatedLinearAttention(Layer):
    """Linear attention with a decay for each key channel (Yang et al. 2023): decay (1), rank-one update and S^T q (2).

    A decay's logarithm is log sigmoid of two projections with few channels between them, divided by `normaliser`. The
    read values are normed head by head and gated by a silu. Tensors have flash-linear-attention's names, but for the
    norm.
    """

    kind: ClassVar[str] = "gated_linear_attention"
    kept: ClassVar[frozenset[str]] = frozenset({"gk_proj.0", "gk_proj.1"})
    heads: int
    k_dim: int
    v_dim: int
    gate_rank: int = 16
    normaliser: float = 16.0
    norm_eps: float = 1e-5

    def tensors(self) -> Shapes:
        keys, values = self.heads * self.k_dim, self.heads * self.v_dim
        outputs = {"q": keys, "k": keys, "v": values, "g": values}
        shapes: Shapes = {f"{name}_proj.weight": (n, self.hidden) for name, n in outputs.items()}
        return shapes | {
            "gk_proj.0.weight": (self.gate_rank, self.hidden),
            "gk_proj.1.weight": (keys, self.gate_rank),
            "gk_proj.1.bias": (keys,),
            "g_norm.weight": (self.v_dim,),
            "o_proj.weight": (self.hidden, values),
        }

    @property
    def token_flops(self) -> int:
        return 5 * self.heads * self.k_dim * self.v_dim

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("recurrent", (self.heads, self.k_dim, self.v_dim)),)

    @property
    def draft_elements(self) -> int:
        return self.heads * (3 * self.k_dim + 2 * self.v_dim)

    @property
    def transition(self) -> tuple[int, ...]:
        """Diagonal: a factor for each key channel."""
        return (self.heads, self.k_dim)

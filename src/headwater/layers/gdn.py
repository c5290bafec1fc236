"""Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class DeltaNet(Layer):
    """Gated DeltaNet (Yang et al. 2024): decay (1), S^T k, rank-one update and S^T q (2 each)."""

    kind: ClassVar[str] = "gated_delta_net"
    kept: ClassVar[frozenset[str]] = frozenset({"in_proj_b", "in_proj_a", "in_proj_ba"})
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int  # taps of the convolution over queries, keys and values
    by_key_head: bool = False  # projections' rows stand key head by key head, each with its value heads (Qwen3-Next)
    norm_eps: float = 1e-6
    apart: bool = False  # queries, keys and values are projected by a weight each (OLMo-Hybrid)
    strength: float = 1.0  # factor of the sigmoid: 2 allows negative eigenvalues (Grazzi et al. 2025)

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def tensors(self) -> Shapes:
        values = self.v_heads * self.v_dim
        if self.by_key_head:
            shapes: Shapes = {
                "in_proj_qkvz.weight": (self.channels + values, self.hidden),
                "in_proj_ba.weight": (2 * self.v_heads, self.hidden),
            }
        else:
            keys = self.k_heads * self.k_dim
            outputs = {"q": keys, "k": keys, "v": values} if self.apart else {"qkv": self.channels}
            outputs |= {"z": values, "b": self.v_heads, "a": self.v_heads}
            shapes = {f"in_proj_{name}.weight": (n, self.hidden) for name, n in outputs.items()}
        return shapes | {
            "conv1d.weight": (self.channels, 1, self.conv),
            "A_log": (self.v_heads,),
            "dt_bias": (self.v_heads,),
            "norm.weight": (self.v_dim,),
            "out_proj.weight": (self.hidden, values),
        }

    @property
    def token_flops(self) -> int:
        return 7 * self.v_heads * self.k_dim * self.v_dim + 2 * self.channels * self.conv

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ("recurrent", (self.v_heads, self.k_dim, self.v_dim)), ("conv", (self.channels, self.conv - 1))

    @property
    def draft_elements(self) -> int:
        return self.channels + self.v_heads * (self.v_dim + 2)

    @property
    def tail_elements(self) -> int:
        return self.channels + 2 * self.v_heads

    @property
    def transition(self) -> tuple[int, ...]:
        """Dense: a matrix over the keys' channels for each head."""
        return (self.v_heads, self.k_dim, self.k_dim)

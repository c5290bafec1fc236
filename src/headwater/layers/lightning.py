"""Linear attention with a fixed decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.attention import Rotary
from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class Lightning(Layer):
    """Linear attention with one fixed decay a head (Qin et al. 2024): decay (1), rank-one update and S^T q (2 each).

    The read values are normed over the whole width (or groups of it) and gated by a sigmoid.
    """

    kind: ClassVar[str] = "lightning"
    heads: int
    head_dim: int
    slopes: tuple[float, ...] = ()  # −log of each head's decay a token; only what computes needs them
    scale: float = 1.0  # of a query times a key
    activated: bool = False  # queries, keys and values pass a silu (MiniMax)
    normed: bool = True  # queries and keys have norms of their own, head by head (Ring)
    rotary: Rotary | None = None  # of queries and keys (Ring); None: no positions
    by_head: bool = False  # rows of the projection stand head by head, q, k and v of each; else all q, all k, all v
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    norm_groups: int = 1  # of the output's norm, each of adjacent heads
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tensors(self) -> Shapes:
        shapes: Shapes = {
            "qkv_proj.weight": (3 * self.width, self.hidden),
            "g_proj.weight": (self.width, self.hidden),
            "g_norm.weight": (self.width,),
            "o_proj.weight": (self.hidden, self.width),
        }
        if self.bias:
            shapes["qkv_proj.bias"] = (3 * self.width,)
        if self.out_bias:
            shapes["o_proj.bias"] = (self.hidden,)
        if self.normed:
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        return shapes

    @property
    def token_flops(self) -> int:
        return 5 * self.width * self.head_dim

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("recurrent", (self.heads, self.head_dim, self.head_dim)),)

    @property
    def draft_elements(self) -> int:
        return 4 * self.width

    @property
    def tail_elements(self) -> int:
        return 3 * self.width

    @property
    def transition(self) -> tuple[int, ...]:
        """A factor for each head."""
        return (self.heads,)


def geometric_slopes(heads: int) -> list[float]:
    """2^(−8/H), 2^(−16/H), …, 2^(−8): ALiBi's (Press et al. 2022, section 3), as Lightning Attention takes them."""
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slopes; for other numbers than powers of two, every second slope of the next power is added."""
    power = 2 ** math.floor(math.log2(heads))
    return geometric_slopes(power) + geometric_slopes(2 * power)[::2][: heads - power]

"""Attention layers: full, whose KV grows with the sequence and whose FLOPs with its square; and over a window."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from headwater.errors import ConfigError
from headwater.layers.layer import Layer, Shapes
from headwater.layers.rotary_scaling import Scaling
from headwater.plan import PrefillFlops


@dataclass(frozen=True, slots=True)
class Rotary:
    """The first `dim` channels of each head rotate (Su et al. 2021); pairs are (i, i + dim/2), or neighbours."""

    dim: int
    theta: float = 10_000.0
    neighbours: bool = False  # pairs are (2i, 2i + 1)
    scaling: Scaling | None = None  # of the frequencies
    amplitude: float = 1.0  # factor of cosines and sines, which some scalings have


def with_pairs(weights: int, width: int) -> PrefillFlops:
    """Return FLOPs of products, and of `width` multiply-adds for each of L(L+1)/2 pairs of a query and a key."""
    return PrefillFlops(2 * weights + width, width)


@dataclass(frozen=True, slots=True)
class GroupedAttention(Layer):
    """Full attention whose `kv_heads` are each shared by a group of query heads."""

    kind: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False  # the output is gated: queries are projected to twice their width, (query, gate) head by head
    normed: bool = False  # queries and keys have norms of their own, head by head
    normed_whole: bool = False  # so they have, over all heads together (OLMo)
    rotary: Rotary | None = None  # None: no positions
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    scale: float | None = None  # of a query times a key; None: 1/√head_dim
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # of the norms' weights, as of the model's
    sinks: bool = False  # a logit of each head joins its softmax as that of a key whose value is zero (gpt-oss)

    def tensors(self) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        outputs = {"q_proj": (2 if self.gated else 1) * queries, "k_proj": keys, "v_proj": keys}
        shapes: Shapes = {f"{name}.weight": (n, self.hidden) for name, n in outputs.items()}
        shapes["o_proj.weight"] = (self.hidden, queries)
        if self.bias:
            shapes |= {f"{name}.bias": (n,) for name, n in outputs.items()}
        if self.out_bias:
            shapes["o_proj.bias"] = (self.hidden,)
        if self.normed:
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        if self.normed_whole:
            shapes |= {"q_norm.weight": (queries,), "k_norm.weight": (keys,)}
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        return shapes

    @property
    def flops(self) -> PrefillFlops:
        return with_pairs(self.product_weights, 2 * self.heads * self.head_dim)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        return (self.kv_heads * self.head_dim,) * 2

    def kv_elements(self, tensor_parallel: int) -> int:
        """Return KV elements per token over all devices; with fewer KV heads than devices, each stores a whole head."""
        few, many = sorted((self.kv_heads, tensor_parallel))
        if many % few or self.heads % tensor_parallel:
            raise ConfigError(
                f"{self.heads} heads with {self.kv_heads} of KV cannot be spread over {tensor_parallel} devices"
            )
        return 2 * many * self.head_dim if tensor_parallel > self.kv_heads else 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class WindowAttention(GroupedAttention):
    """Sliding-window attention: a query sees the last `window` tokens; their keys and values are the layer's state.

    FLOPs are those of a token with a full window before it.
    """

    kind: ClassVar[str] = "window_attention"
    window: int = 4096  # tokens

    @classmethod
    def of(cls, full: GroupedAttention, window: int) -> WindowAttention:
        """Build the same layer with a window."""
        return cls(**{field.name: getattr(full, field.name) for field in fields(full)}, window=window)

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self.product_weights + 4 * self.heads * self.head_dim * self.window, 0)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        return ()

    def kv_elements(self, tensor_parallel: int) -> int:
        return 0

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """A ring: the token at position p stands in row p mod `window`."""
        shape = (self.window, self.kv_heads, self.head_dim)
        return ("keys", shape), ("values", shape)

    @property
    def draft_elements(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def tail_elements(self) -> int:
        return 2 * self.kv_heads * self.head_dim

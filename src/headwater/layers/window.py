"""Sliding-window attention: what it keeps does not grow with the sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from headwater.layers.attention import GroupedAttention
from headwater.plan import PrefillFlops


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
        pairs = 2 * self.heads * self.head_dim * self.window
        return PrefillFlops(2 * (self.product_weights + pairs), 0)

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

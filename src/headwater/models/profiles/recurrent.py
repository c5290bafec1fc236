"""Recurrent layers: a state of one size, whatever the sequence's length, and FLOPs in proportion to it.

Each counts the operations that its recurrence does on an element of the state, a token; exponentials count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.models.profiles.layer import Layer
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class DeltaNet(Layer):
    """Gated DeltaNet (Yang et al. 2024): decay (1), S^T k, rank-one update and S^T q (2 each)."""

    kind: ClassVar[str] = "gated_delta_net"
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int  # taps of the convolution over queries, keys and values

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def _projections(self) -> int:
        """Queries, keys, values, the output's gate, decay and beta of each head, and the output."""
        return self.hidden * (self.channels + 2 * self.v_heads * self.v_dim + 2 * self.v_heads)

    @property
    def weights(self) -> int:
        return self._projections + self.channels * self.conv + 2 * self.v_heads + self.v_dim

    @property
    def flops(self) -> PrefillFlops:
        state = 7 * self.v_heads * self.k_dim * self.v_dim
        return PrefillFlops(2 * self._projections + state + 2 * self.channels * self.conv, 0)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        return ("recurrent", self.v_heads * self.k_dim * self.v_dim), ("conv", self.channels * (self.conv - 1))


@dataclass(frozen=True, slots=True)
class DeltaAttention(Layer):
    """Kimi Delta Attention (Kimi Linear, 2025): Gated DeltaNet with a decay for each key channel.

    Decay and output gate are made by two projections with `head_dim` channels between them.
    """

    kind: ClassVar[str] = "delta_attention"
    heads: int
    head_dim: int
    conv: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def _projections(self) -> int:
        low_rank = self.head_dim * (self.hidden + self.width)
        return self.hidden * (4 * self.width + self.heads) + 2 * low_rank

    @property
    def weights(self) -> int:
        return self._projections + 3 * self.width * self.conv + self.width + self.heads + self.head_dim

    @property
    def flops(self) -> PrefillFlops:
        state = 7 * self.width * self.head_dim
        return PrefillFlops(2 * self._projections + state + 6 * self.width * self.conv, 0)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        return ("recurrent", self.width * self.head_dim), ("conv", 3 * self.width * (self.conv - 1))


@dataclass(frozen=True, slots=True)
class Mamba(Layer):
    """Mamba-1 (Gu & Dao 2023): step times A, decay, step times x times B, sum (4), and C h (2)."""

    kind: ClassVar[str] = "mamba"
    inner: int
    state: int
    conv: int
    step_rank: int  # channels between the two projections of the step

    @property
    def _projections(self) -> int:
        step = self.inner * (self.step_rank + 2 * self.state) + self.step_rank * self.inner
        return 3 * self.hidden * self.inner + step

    @property
    def weights(self) -> int:
        return self._projections + self.inner * (self.conv + self.state + 3)  # biases of conv and step, and D

    @property
    def flops(self) -> PrefillFlops:
        recurrence = self.inner * (6 * self.state + 2 * self.conv)
        return PrefillFlops(2 * self._projections + recurrence, 0)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        return ("recurrent", self.inner * self.state), ("conv", self.inner * (self.conv - 1))


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

    @property
    def _projections(self) -> int:
        """Gate, x, B, C and the step of each head, and the output."""
        return self.hidden * (2 * self.inner + self.channels + self.heads)

    @property
    def weights(self) -> int:
        norm = self.inner if self.normed else 0
        return self._projections + self.channels * (self.conv + 1) + 3 * self.heads + norm

    @property
    def flops(self) -> PrefillFlops:
        recurrence = 5 * self.inner * self.state + 2 * self.channels * self.conv
        return PrefillFlops(2 * self._projections + recurrence, 0)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        return ("recurrent", self.inner * self.state), ("conv", self.channels * (self.conv - 1))


@dataclass(frozen=True, slots=True)
class Lightning(Layer):
    """Linear attention with one fixed decay a head (Qin et al. 2024): decay (1), rank-one update and S^T q (2 each)."""

    kind: ClassVar[str] = "lightning"
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def weights(self) -> int:
        """Queries, keys, values, the output's gate, and the output; norms of queries, keys and output."""
        return 5 * self.hidden * self.width + 2 * self.head_dim + self.width

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(10 * self.hidden * self.width + 5 * self.width * self.head_dim, 0)

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        return (("recurrent", self.width * self.head_dim),)

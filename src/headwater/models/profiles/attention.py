"""Attention layers: their KV grows with the sequence, and their FLOPs with its square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.errors import ConfigError
from headwater.models.profiles.layer import Layer
from headwater.types import PrefillFlops


def _with_pairs(weights: int, width: int) -> PrefillFlops:
    """Projections, and `width` multiply-adds for each pair of a query and a key that it may see: L(L+1)/2 of them."""
    return PrefillFlops(2 * weights + width, width)


@dataclass(frozen=True, slots=True)
class GroupedAttention(Layer):
    """Full attention whose `kv_heads` are each shared by a group of query heads."""

    kind: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False  # the output is gated: queries are projected to twice their width
    normed: bool = False  # queries and keys have norms of their own

    @property
    def weights(self) -> int:
        return self._projections + (2 * self.head_dim if self.normed else 0)

    @property
    def _projections(self) -> int:
        return self.hidden * ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def flops(self) -> PrefillFlops:
        return _with_pairs(self._projections, 2 * self.heads * self.head_dim)

    def kv_elements(self, tensor_parallel: int) -> int:
        """Where there are fewer KV heads than devices, each device keeps a whole one."""
        few, many = sorted((self.kv_heads, tensor_parallel))
        if many % few or self.heads % tensor_parallel:
            raise ConfigError(
                f"{self.heads} heads with {self.kv_heads} of KV cannot be spread over {tensor_parallel} devices"
            )
        return 2 * many * self.head_dim if tensor_parallel > self.kv_heads else 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention(Layer):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): what is cached is one latent row and one shared key part.

    FLOPs are those of prefill, with keys and values taken from the latent row once a token.
    """

    kind: ClassVar[str] = "latent_attention"
    heads: int
    latent: int  # channels of the compressed keys and values
    nope_dim: int  # of a head's queries and keys, without position
    rope_dim: int  # with position; its key is shared by all heads
    v_dim: int

    @property
    def weights(self) -> int:
        return self._projections + self.latent  # the latent row's norm

    @property
    def _projections(self) -> int:
        queries = self.hidden * self.heads * (self.nope_dim + self.rope_dim)
        down = self.hidden * (self.latent + self.rope_dim)
        up = self.latent * self.heads * (self.nope_dim + self.v_dim)
        return queries + down + up + self.heads * self.v_dim * self.hidden

    @property
    def flops(self) -> PrefillFlops:
        return _with_pairs(self._projections, self.heads * (self.nope_dim + self.rope_dim + self.v_dim))

    def kv_elements(self, tensor_parallel: int) -> int:
        """Every device keeps the whole row: it has no heads to spread."""
        return tensor_parallel * (self.latent + self.rope_dim)

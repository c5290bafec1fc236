"""Multi-head latent attention (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.attention import with_pairs
from headwater.layers.layer import Layer, Shapes
from headwater.layers.rotary import Rotary
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class LatentAttention(Layer):
    """What is cached is one latent row and one key part that all heads share.

    FLOPs are those of prefill, with keys and values taken from the latent row once a token.
    """

    kind: ClassVar[str] = "latent_attention"
    heads: int
    latent: int  # channels of the compressed keys and values
    nope_dim: int  # of a head's queries and keys, without position
    rope_dim: int  # with position, or at least set apart for it; its key is shared by all heads
    v_dim: int
    rotary: Rotary | None = None  # of the `rope_dim` channels; None: no positions there either (Kimi-Linear)
    norm_eps: float = 1e-6

    def tensors(self) -> Shapes:
        return {
            "q_proj.weight": (self.heads * (self.nope_dim + self.rope_dim), self.hidden),
            "kv_a_proj_with_mqa.weight": (self.latent + self.rope_dim, self.hidden),
            "kv_a_layernorm.weight": (self.latent,),
            "kv_b_proj.weight": (self.heads * (self.nope_dim + self.v_dim), self.latent),
            "o_proj.weight": (self.hidden, self.heads * self.v_dim),
        }

    @property
    def flops(self) -> PrefillFlops:
        return with_pairs(self.product_weights, self.heads * (self.nope_dim + self.rope_dim + self.v_dim))

    @property
    def kv_widths(self) -> tuple[int, ...]:
        return (self.latent + self.rope_dim,)

    def kv_elements(self, tensor_parallel: int) -> int:
        """Every device keeps the whole row: it has no heads to spread."""
        return tensor_parallel * (self.latent + self.rope_dim)

"""Multi-head latent attention (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.attention import Rotary, with_pairs
from headwater.layers.layer import Layer, Shapes
from headwater.plan import PrefillFlops


@dataclass(frozen=True, slots=True)
class LatentAttention(Layer):
    """Multi-head latent attention (MLA): caches one latent row and one key part shared by all heads.

    FLOPs are those of prefill, with keys and values taken from the latent row once a token.
    """

    kind: ClassVar[str] = "latent_attention"
    kept: ClassVar[frozenset[str]] = frozenset({"g_proj", "kv_b_proj"})  # the absorbed form is made from the latter
    heads: int
    latent: int  # channels of the compressed keys and values
    nope_dim: int  # of a head's queries and keys, without position
    rope_dim: int  # with position, or at least set apart for it; its key is shared by all heads
    v_dim: int
    rotary: Rotary | None = None  # of the `rope_dim` channels; None: no positions there either (Kimi-Linear)
    norm_eps: float = 1e-6  # of the latents' norms, which have an epsilon of their own
    q_latent: int = 0  # channels of the compressed queries; 0: they are not compressed
    bias: bool = False  # of the down projection to the latents, and of the output
    gated: bool = False  # each head's output is multiplied by the sigmoid of one channel (Ling 3.0)
    scale: float | None = None  # of a query times a key; None: 1/√key_dim

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor of a query times a key."""
        return self.key_dim**-0.5 if self.scale is None else self.scale

    def tensors(self) -> Shapes:
        hidden, queries = self.hidden, self.heads * self.key_dim
        shapes: Shapes = {
            "kv_a_proj_with_mqa.weight": (self.latent + self.rope_dim, hidden),
            "kv_a_layernorm.weight": (self.latent,),
            "kv_b_proj.weight": (self.heads * (self.nope_dim + self.v_dim), self.latent),
            "o_proj.weight": (hidden, self.heads * self.v_dim),
        }
        if self.q_latent:
            shapes |= {"q_a_proj.weight": (self.q_latent, hidden), "q_a_layernorm.weight": (self.q_latent,)}
            shapes["q_b_proj.weight"] = (queries, self.q_latent)
        else:
            shapes["q_proj.weight"] = (queries, hidden)
        if self.gated:
            shapes["g_proj.weight"] = (self.heads, hidden)
        if self.bias:
            biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
            shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased if f"{name}.weight" in shapes}
        return shapes

    @property
    def flops(self) -> PrefillFlops:
        return with_pairs(self.product_weights, self.heads * (self.key_dim + self.v_dim))

    @property
    def kv_widths(self) -> tuple[int, ...]:
        return (self.latent + self.rope_dim,)

    def kv_elements(self, tensor_parallel: int) -> int:
        """Return KV elements per token: every device stores the whole row, which has no heads to split."""
        return tensor_parallel * (self.latent + self.rope_dim)

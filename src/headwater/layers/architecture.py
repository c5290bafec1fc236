"""Architecture of a text model: blocks of layers, and the names of their tensors in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.layers.layer import Layer

# of a text model, by itself or in a larger one
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


@dataclass(frozen=True, slots=True)
class Part:
    """A layer of a model, and the names of its tensors in a checkpoint."""

    layer: Layer
    at: str  # prefix of the tensors' names within the text model: "layers.0.self_attn"
    names: tuple[tuple[str, str], ...] = ()  # (ours, the checkpoint's) for the parts of names that differ
    interleaved: bool = False  # experts' gate and up alternate in one tensor, [inputs, outputs] if not quantised
    in_scale: float = 1.0  # factor of the layer's input
    out_scale: float = 1.0  # factor of the layer's output


@dataclass(frozen=True, slots=True)
class Block:
    """x ← keep · x + scale · Σ parts(norm(x)): one step of the residual stream."""

    norm: str  # name of the norm's weight: "layers.0.input_layernorm.weight"
    parts: tuple[Part, ...]  # all have the same input; their outputs are added in this order
    keep: float = 1.0
    scale: float = 1.0
    keeps_normed: bool = False  # keep · norm(x) instead of keep · x (MiniMax)
    norm_after: bool = False  # norm(part(x)) instead of part(norm(x)) (OLMo)
    norm_otherwise: str = ""  # name of the norm's weight in files of another writer


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Head of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): it drafts the token after the next.

    Its input is the product of two norms side by side: of the embedding of a token, and of the model's hidden state
    before that token, after the model's final norm. Embedding and last product are the model's. Names are full.
    """

    embedding_norm: str
    hidden_norm: str
    product: str  # weight [C, 2 C]
    blocks: tuple[Block, ...]
    final_norm: str

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is the head's."""
        named = (self.embedding_norm, self.hidden_norm, self.product, self.final_norm)
        return name in (*named, *(block.norm for block in self.blocks)) or name.startswith(
            tuple(f"{part.at}." for block in self.blocks for part in block.parts)
        )


@dataclass(frozen=True)
class Architecture:
    """Architecture of a text model of any family, read from a checkpoint's config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[Block, ...]
    max_length: int  # tokens
    norm_eps: float
    norm_offset: float = 0.0  # added to the weights of norms: some checkpoints store them centred at zero
    tied: bool = False  # the head's weight is the embedding's
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    head: str = "lm_head.weight"
    prefixes: tuple[str, ...] = PREFIXES  # one of them precedes all names except the head's
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    float32_residual: bool = False  # the residual stream is float32, independent of the layers' dtype
    mtp: MtpHead | None = None  # checkpoints of the family may have it

"""Granite 4: Mamba-2 and attention, experts beside a shared MLP or that alone, and multipliers all along."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.models.families.bamba import read_heads, read_mixer
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.reading import read_count, read_rotary, read_types
from headwater.spec import Architecture, Block, Part

MAMBA, ATTENTION = "linear_attention", "full_attention"
KINDS = {MAMBA: MAMBA, ATTENTION: ATTENTION, "mamba": MAMBA, "attention": ATTENTION}
SHARED_NAMES = (("gate_up_proj", "shared_mlp.input_linear"), ("down_proj", "shared_mlp.output_linear"))
ROUTED_NAMES = (
    ("gate.weight", "block_sparse_moe.router.layer.weight"),
    ("experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("experts.down_proj", "block_sparse_moe.output_linear.weight"),
    *((f"shared_expert.{ours}", theirs) for ours, theirs in SHARED_NAMES),
)
EPS = 1e-6


def read_granite(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    n_layers = read_count(keys)
    types = read_types(keys, tuple(KINDS), [MAMBA] * n_layers)
    mixers = {MAMBA: (read_mixer(keys, EPS), "mamba"), ATTENTION: (_read_attention(keys), "self_attn")}
    ffn = _read_experts(keys)
    names = ROUTED_NAMES if isinstance(ffn, Experts) else SHARED_NAMES
    scale = keys.number("residual_multiplier", 1.0)
    blocks = []
    for i, kind in enumerate(types):
        at, (mixer, name) = f"layers.{i}", mixers[KINDS[kind]]
        blocks.append(Block(f"{at}.input_layernorm.weight", (Part(mixer, f"{at}.{name}"),), scale=scale))
        blocks.append(Block(f"{at}.post_attention_layernorm.weight", (Part(ffn, at, names),), scale=scale))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=keys.positive("hidden_size"),
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 2048),
        norm_eps=keys.number("rms_norm_eps", EPS),
        tied=keys.flag("tie_word_embeddings", False),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=1 / _logits_divisor(keys),
    )


def _logits_divisor(keys: ConfigKeys) -> float:
    divisor = keys.number("logits_scaling", 1.0)
    if divisor == 0:
        raise CheckpointError("config.json: key 'logits_scaling' is 0.0, logits are divided by it")
    return divisor


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    """Without positions, unless `position_embedding_type` is "rope"."""
    heads, kv_heads, head_dim = read_heads(keys)
    positions = keys.optional("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise CheckpointError(
            f"config.json: key 'position_embedding_type' is {positions!r}, only 'rope' and 'nope' are supported"
        )
    keys.require("partial_rotary_factor", 1.0, default=1.0)
    bias = keys.flag("attention_bias", False)
    return GroupedAttention(
        keys.positive("hidden_size"),
        heads,
        kv_heads,
        head_dim,
        rotary=read_rotary(keys, head_dim) if positions == "rope" else None,
        bias=bias,
        out_bias=bias,
        scale=keys.number("attention_multiplier", 1.0),
    )


def _read_experts(keys: ConfigKeys) -> Experts | Mlp:
    """A softmax over the chosen experts' logits is one over all of them, scaled to sum to 1."""
    hidden, shared = keys.positive("hidden_size"), keys.positive("shared_intermediate_size", 1024)
    experts = keys.integer("num_local_experts", 8)
    if not experts:
        return Mlp(hidden, shared)
    per_token = keys.positive("num_experts_per_tok", 2)
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return Experts(hidden, experts, per_token, keys.positive("intermediate_size"), shared=shared)


GRANITE = Family(
    "Granite 4",
    ("granitemoehybrid",),
    read_granite,
    oracle="transformers",
    profile="granite-4.0-h-small",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        Refusal(
            "learned positions", {"position_embedding_type": "learned"}, "is 'learned', only 'rope' and 'nope' are"
        ),
        Refusal("layers of another kind", {"layer_types": ["mamba", "window"]}, "layer type 'window' is not one of "),
    ),
)

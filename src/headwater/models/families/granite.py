"""Granite 4: Mamba-2 and attention, experts and a shared MLP or only the MLP, and multipliers throughout."""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.models.families import reading
from headwater.models.families.bamba import read_attention, read_mixer
from headwater.models.families.family import FULL, LINEAR, OTHER_ACTIVATIONS, Family, Refusal, only

SHARED_NAMES = (("gate_up_proj", "shared_mlp.input_linear"), ("down_proj", "shared_mlp.output_linear"))
ROUTED_NAMES = (
    ("gate.weight", "block_sparse_moe.router.layer.weight"),
    ("experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("experts.down_proj", "block_sparse_moe.output_linear.weight"),
    *((f"shared_expert.{ours}", theirs) for ours, theirs in SHARED_NAMES),
)
EPS = 1e-6


def read_granite(keys: ConfigKeys) -> Architecture:
    mamba, attention = (read_mixer(keys, EPS), "mamba"), (_read_attention(keys), "self_attn")
    mixers = {LINEAR: mamba, "mamba": mamba, FULL: attention, "attention": attention}
    ffn = _read_experts(keys)
    names = ROUTED_NAMES if isinstance(ffn, Experts) else SHARED_NAMES
    scale = keys.number("residual_multiplier", 1.0)
    blocks = []
    for i, kind in enumerate(reading.types(keys, tuple(mixers), [LINEAR] * reading.count(keys))):
        at, (mixer, name) = f"layers.{i}", mixers[kind]
        blocks.append(Block(f"{at}.input_layernorm.weight", (Part(mixer, f"{at}.{name}"),), scale=scale))
        blocks.append(Block(f"{at}.post_attention_layernorm.weight", (Part(ffn, at, names),), scale=scale))
    return reading.architecture(
        keys,
        blocks,
        2048,
        keys.number("rms_norm_eps", EPS),
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
    positions = keys.optional("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise CheckpointError(
            f"config.json: key 'position_embedding_type' is {positions!r}, only 'rope' and 'nope' are supported"
        )
    keys.require("partial_rotary_factor", 1.0, default=1.0)
    attention = read_attention(keys, rotated=1.0 if positions == "rope" else None)
    return replace(attention, scale=keys.number("attention_multiplier", 1.0))


def _read_experts(keys: ConfigKeys) -> Experts | Mlp:
    """A softmax over the chosen experts' logits is one over all of them, scaled to sum to 1."""
    shared, experts = keys.positive("shared_intermediate_size", 1024), keys.integer("num_local_experts", 8)
    if not experts:
        return Mlp(keys.positive("hidden_size"), shared)
    return reading.experts(keys, experts, keys.positive("num_experts_per_tok", 2), shared=shared)


FAMILY = Family(
    "Granite 4",
    ("granitemoehybrid",),
    read_granite,
    architectures=("GraniteMoeHybridForCausalLM",),
    profile="granite-4.0-h-small",
    refuses=(
        OTHER_ACTIVATIONS,
        only("other norms", "normalization_function", "layernorm", "rmsnorm"),
        Refusal(
            "learned positions", {"position_embedding_type": "learned"}, "is 'learned', only 'rope' and 'nope' are"
        ),
        Refusal("layers of another kind", {"layer_types": ["mamba", "window"]}, "layer type 'window' is not one of "),
    ),
)

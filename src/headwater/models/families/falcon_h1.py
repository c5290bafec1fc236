"""Falcon-H1: attention and Mamba-2 side by side in each layer, and multipliers in the place of learned scales."""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Mlp
from headwater.layers.mamba2 import Mamba2
from headwater.models.families.bamba import read_heads, read_mixer
from headwater.models.families.family import Family, only
from headwater.models.families.reading import read_count, read_numbers, read_rotary
from headwater.spec import Architecture, Block, Part

EPS = 1e-5


def read_falcon_h1(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    keys.require("attn_layer_indices", None, default=None)
    keys.require("mamba_use_mlp", True, default=True)
    attention, mamba = _read_attention(keys), _read_mamba(keys)
    gate_scale, down_scale = read_numbers(keys, "mlp_multipliers", (1.0, 1.0))
    hidden, bias = keys.positive("hidden_size"), keys.flag("mlp_bias", False)
    mlp = Mlp(hidden, keys.positive("intermediate_size"), bias=bias, gate_scale=gate_scale)
    scales = {
        name: keys.number(f"{name}_multiplier", 1.0)
        for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "embedding", "lm_head")
    }
    blocks = []
    for i in range(read_count(keys)):
        at = f"layers.{i}"
        mixers = (
            Part(mamba, f"{at}.mamba", in_scale=scales["ssm_in"], out_scale=scales["ssm_out"]),
            Part(attention, f"{at}.self_attn", in_scale=scales["attention_in"], out_scale=scales["attention_out"]),
        )
        blocks.append(Block(f"{at}.input_layernorm.weight", mixers))
        blocks.append(Block(f"{at}.pre_ff_layernorm.weight", (Part(mlp, f"{at}.feed_forward", out_scale=down_scale),)))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 8192),
        norm_eps=keys.number("rms_norm_eps", EPS),
        tied=keys.flag("tie_word_embeddings", False),
        final_norm="final_layernorm.weight",
        embedding_scale=scales["embedding"],
        logits_scale=scales["lm_head"],
    )


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    """Keys times their multiplier are scores times it: rotation changes no length."""
    heads, kv_heads, head_dim = read_heads(keys)
    bias = keys.flag("attention_bias", False)
    return GroupedAttention(
        keys.positive("hidden_size"),
        heads,
        kv_heads,
        head_dim,
        rotary=read_rotary(keys, head_dim),
        bias=bias,
        out_bias=bias,
        scale=keys.number("key_multiplier", 1.0) * head_dim**-0.5,
    )


def _read_mamba(keys: ConfigKeys) -> Mamba2:
    z, x, b, c, dt = read_numbers(keys, "ssm_multipliers", (1.0,) * 5)
    return replace(
        read_mixer(keys, EPS),
        normed=keys.flag("mamba_rms_norm", False),
        norm_first=keys.flag("mamba_norm_before_gate", True),
        out_bias=keys.flag("projectors_bias", False),
        scales=(z, x, b, c, dt),
    )


FALCON_H1 = Family(
    "Falcon-H1",
    ("falcon_h1",),
    read_falcon_h1,
    oracle="transformers",
    profile="falcon-h1-7b",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        only("attention in some layers only", "attn_layer_indices", [0], None),
        only("layers without an MLP", "mamba_use_mlp", False, True),
        only("scaled rotation", "rope_type", "yarn", "default"),
        only("scaled rotation", "rope_scaling", {"type": "linear"}, None),
    ),
)

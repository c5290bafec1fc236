"""Falcon-H1: attention and Mamba-2 side by side in each layer, and multipliers instead of learned scales."""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.feed_forward import Mlp
from headwater.layers.mamba2 import Mamba2
from headwater.models.families import reading
from headwater.models.families.bamba import read_attention, read_mixer
from headwater.models.families.family import DYNAMIC_ROTATION, OTHER_ACTIVATIONS, Family, only

EPS = 1e-5


def read_falcon_h1(keys: ConfigKeys) -> Architecture:
    attention, mamba = read_attention(keys), _read_mamba(keys)
    # Keys times their multiplier are scores times it: rotation changes no length.
    attention = replace(attention, scale=keys.number("key_multiplier", 1.0) * attention.head_dim**-0.5)
    gate_scale, down_scale = reading.numbers(keys, "mlp_multipliers", (1.0, 1.0))
    bias = keys.flag("mlp_bias", False)
    mlp = Mlp(mamba.hidden, keys.positive("intermediate_size"), bias=bias, gate_scale=gate_scale)
    scales = {
        name: keys.number(f"{name}_multiplier", 1.0)
        for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "embedding", "lm_head")
    }
    blocks = []
    for i in range(reading.count(keys)):
        at = f"layers.{i}"
        mixers = (
            Part(mamba, f"{at}.mamba", in_scale=scales["ssm_in"], out_scale=scales["ssm_out"]),
            Part(attention, f"{at}.self_attn", in_scale=scales["attention_in"], out_scale=scales["attention_out"]),
        )
        blocks.append(Block(f"{at}.input_layernorm.weight", mixers))
        blocks.append(Block(f"{at}.pre_ff_layernorm.weight", (Part(mlp, f"{at}.feed_forward", out_scale=down_scale),)))
    return reading.architecture(
        keys,
        blocks,
        8192,
        keys.number("rms_norm_eps", EPS),
        final_norm="final_layernorm.weight",
        embedding_scale=scales["embedding"],
        logits_scale=scales["lm_head"],
    )


def _read_mamba(keys: ConfigKeys) -> Mamba2:
    z, x, b, c, dt = reading.numbers(keys, "ssm_multipliers", (1.0,) * 5)
    return replace(
        read_mixer(keys, EPS),
        normed=keys.flag("mamba_rms_norm", False),
        norm_first=keys.flag("mamba_norm_before_gate", True),
        out_bias=keys.flag("projectors_bias", False),
        scales=(z, x, b, c, dt),
    )


FAMILY = Family(
    "Falcon-H1",
    ("falcon_h1",),
    read_falcon_h1,
    architectures=("FalconH1ForCausalLM",),
    profile="falcon-h1-7b",
    refuses=(
        OTHER_ACTIVATIONS,
        only("attention in some layers only", "attn_layer_indices", [0], None),
        only("layers without an MLP", "mamba_use_mlp", False, True),
        DYNAMIC_ROTATION,
    ),
)

"""Lara-mini: Gated DeltaNet, attention over a window, and attention without positions; experts and a shared one."""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import WindowAttention
from headwater.layers.layer import Layer
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, FULL, LINEAR, OTHER_ACTIVATIONS, Family, Refusal
from headwater.models.families.qwen3 import SLIDING, read_attention
from headwater.models.families.qwen3_next import read_delta_net

PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def read_lara_mini(keys: ConfigKeys) -> Architecture:
    attention = read_attention(keys, SLIDING)
    mixers: dict[str, tuple[Layer, str, tuple[tuple[str, str], ...]]] = {
        FULL: (replace(attention, rotary=None), "self_attn", ()),
        LINEAR: (read_delta_net(keys), "linear_attn", (("norm", "out_norm"),)),
        SLIDING: (WindowAttention.of(attention, keys.positive("sliding_window", 512)), "self_attn", ()),
    }
    experts = reading.experts(
        keys,
        keys.positive("num_experts"),
        keys.positive("num_experts_per_tok"),
        "moe_intermediate_size",
        shared=keys.positive("shared_expert_intermediate_size"),
        normalise=keys.flag("norm_topk_prob", True),
        float32_router=True,
    )
    regular = [PATTERN[i % len(PATTERN)] for i in range(reading.count(keys))]
    blocks = []
    for i, kind in enumerate(reading.types(keys, tuple(mixers), regular)):
        layer, name, names = mixers[kind]
        blocks.append(Block(f"layers.{i}.input_layernorm.weight", (Part(layer, f"layers.{i}.{name}", names),)))
        blocks.append(reading.block(i, "post_attention_layernorm", experts, "mlp"))
    return reading.architecture(keys, blocks, 131_072, keys.number("rms_norm_eps", 1e-6), tied=True)


FAMILY = Family(
    "Lara-mini",
    ("lara_mini",),
    read_lara_mini,
    architectures=("LaraMiniForCausalLM",),
    profile="lara-4-mini",
    refuses=(
        OTHER_ACTIVATIONS,
        DYNAMIC_ROTATION,
        Refusal(
            "layers of another kind",
            {"layer_types": ["conv", SLIDING, FULL]},
            f"layer type 'conv' is not one of {sorted((FULL, LINEAR, SLIDING))}",
        ),
    ),
)

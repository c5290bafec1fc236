"""gpt-oss: attention with sinks, over a window and over all tokens in turn; experts with biases and clamped gates."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.feed_forward import CLAMPED_SWIGLU
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, FULL, OTHER_ACTIVATIONS, Family, Refusal, only
from headwater.models.families.qwen3 import SLIDING
from headwater.models.families.rotation import DESCRIPTIONS, TRAINED, read_rotary

LIMIT = "swiglu_limit"
ROPE_THETA = 150_000.0
YARN = {"rope_type": "yarn", "factor": 32.0, TRAINED: 4096, "truncate": False}
NORM_EPS = 1e-5


def read_gpt_oss(keys: ConfigKeys) -> Architecture:
    if not any(keys.optional(name) for name in DESCRIPTIONS):
        keys = keys.with_values({"rope_scaling": YARN})
    experts = reading.experts(
        keys,
        keys.positive(reading.said(keys, "num_local_experts", "num_experts"), 128),
        keys.positive("num_experts_per_tok", 4),
        activation=CLAMPED_SWIGLU,
        limit=keys.number(LIMIT, 7.0),
        routed_bias=True,
    )
    window = keys.positive("sliding_window", 128)
    mixers = {FULL: _read_attention(keys, FULL), SLIDING: WindowAttention.of(_read_attention(keys, SLIDING), window)}
    regular = [FULL if i % 2 else SLIDING for i in range(reading.count(keys))]
    blocks = []
    for i, kind in enumerate(reading.types(keys, (FULL, SLIDING), regular)):
        blocks.append(reading.block(i, "input_layernorm", mixers[kind], "self_attn"))
        routed = Part(experts, f"layers.{i}.mlp", (("gate", "router"),), interleaved=True)
        blocks.append(Block(f"layers.{i}.post_attention_layernorm.weight", (routed,)))
    return reading.architecture(keys, blocks, 131_072, keys.number("rms_norm_eps", NORM_EPS))


def _read_attention(keys: ConfigKeys, layer_type: str) -> GroupedAttention:
    head_dim, bias = reading.head_dim(keys), keys.flag("attention_bias", True)
    rotary = read_rotary(keys, head_dim, theta=ROPE_THETA, layer_type=layer_type)
    return reading.attention(keys, head_dim, rotary=rotary, bias=bias, out_bias=bias, sinks=True)


FAMILY = Family(
    "gpt-oss",
    ("gpt_oss",),
    read_gpt_oss,
    architectures=("GptOssForCausalLM",),
    profile="gpt-oss-20b",
    reads=(LIMIT,),
    refuses=(
        OTHER_ACTIVATIONS,
        DYNAMIC_ROTATION,
        only("other slopes of the gate's sigmoid", "swiglu_alpha", 1.0, 1.702),
        Refusal(
            "layers of another kind",
            {"layer_types": ["linear_attention", FULL]},
            f"layer type 'linear_attention' is not one of {sorted((FULL, SLIDING))}",
        ),
    ),
)

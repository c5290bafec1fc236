"""Qwen3, dense and with experts: attention only, over all tokens or over a window of the last ones."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture
from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, FULL, OTHER_ACTIVATIONS, Family, Refusal
from headwater.models.families.rotation import read_rotary

SLIDING = "sliding_attention"
MOE = "qwen3_moe"
HEAD_DIM = 128


def read_qwen3(keys: ConfigKeys) -> Architecture:
    full = read_attention(keys, FULL)
    window = keys.positive("sliding_window") if keys.flag("use_sliding_window", False) else 0  # tokens, 0: none
    mixers = {FULL: full} | ({SLIDING: WindowAttention.of(read_attention(keys, SLIDING), window)} if window else {})
    experts = _read_experts(keys)
    blocks = []
    for i, name in enumerate(_read_types(keys, window)):
        routed = experts if experts and is_routed(keys, i) else None
        ffn = routed or Mlp(full.hidden, keys.positive("intermediate_size"))
        blocks.append(reading.block(i, "input_layernorm", mixers[name], "self_attn"))
        blocks.append(reading.block(i, "post_attention_layernorm", ffn, "mlp"))
    return reading.architecture(keys, blocks, 32768, keys.number("rms_norm_eps", 1e-6))


def _read_types(keys: ConfigKeys, window: int) -> tuple[str, ...]:
    """Read layer types; by default layers from `max_window_layers` on have the window, with experts all layers."""
    first = 0 if keys.text("model_type") == MOE else keys.integer("max_window_layers", 28)
    regular = [SLIDING if window and i >= first else FULL for i in range(reading.count(keys))]
    types = reading.types(keys, (FULL, SLIDING), regular)
    if SLIDING in types and not window:
        raise CheckpointError(
            f"config.json: layer type {SLIDING!r} has no window: key 'use_sliding_window' is {False!r}"
        )
    return types


def read_attention(keys: ConfigKeys, layer_type: str) -> GroupedAttention:
    """Read the attention of a type of layer, over all tokens."""
    head_dim = reading.head_dim(keys, None if keys.text("model_type") == MOE else HEAD_DIM)
    bias = keys.flag("attention_bias", False)
    return reading.attention(
        keys,
        head_dim,
        normed=True,
        rotary=read_rotary(keys, head_dim, layer_type=layer_type),
        bias=bias,
        out_bias=bias,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def is_routed(keys: ConfigKeys, i: int) -> bool:
    """Return whether the i-th layer of a model with experts has them."""
    step = keys.positive("decoder_sparse_step", 1)
    return i not in keys.listed("mlp_only_layers", []) and (i + 1) % step == 0


def _read_experts(keys: ConfigKeys) -> Experts | None:
    if keys.text("model_type") != MOE:
        return None
    experts, per_token = (
        keys.positive("num_experts", keys.integer("num_local_experts", 0)),
        keys.positive("num_experts_per_tok"),
    )
    return reading.experts(
        keys, experts, per_token, "moe_intermediate_size", normalise=keys.flag("norm_topk_prob", False)
    )


FAMILY = Family(
    "Qwen3",
    ("qwen3", MOE),
    read_qwen3,
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    profile="qwen3-8b",
    refuses=(
        OTHER_ACTIVATIONS,
        DYNAMIC_ROTATION,
        Refusal("windows of no size", {"layer_types": [SLIDING, SLIDING]}, f"layer type {SLIDING!r} has no window"),
    ),
)

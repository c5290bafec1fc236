"""Qwen3, dense and with experts: attention only, over all tokens or over a window of the last ones."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.window import WindowAttention
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.reading import block, read_count, read_rotary, read_types
from headwater.spec import Architecture

FULL, SLIDING = "full_attention", "sliding_attention"
MOE = "qwen3_moe"
HEAD_DIM = 128


def read_qwen3(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    hidden, n_layers = keys.positive("hidden_size"), read_count(keys)
    full, window = _read_attention(keys), _read_window(keys)
    mixers: dict[str, GroupedAttention] = {FULL: full}
    if window:
        mixers[SLIDING] = WindowAttention.of(full, window)
    blocks = []
    experts = _read_experts(keys)
    for i, name in enumerate(_read_types(keys, n_layers, window)):
        routed = experts is not None and _is_routed(keys, i)
        ffn = experts if experts and routed else Mlp(hidden, keys.positive("intermediate_size"))
        blocks.append(block(i, "input_layernorm", mixers[name], "self_attn"))
        blocks.append(block(i, "post_attention_layernorm", ffn, "mlp"))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 32768),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings", False),
    )


def _read_window(keys: ConfigKeys) -> int:
    """Read the window's tokens, or 0: its size counts only if windows are enabled."""
    return keys.positive("sliding_window") if keys.flag("use_sliding_window", False) else 0


def _read_types(keys: ConfigKeys, n_layers: int, window: int) -> tuple[str, ...]:
    """Read layer types; by default layers from `max_window_layers` on have the window, with experts all layers."""
    first = 0 if keys.text("model_type") == MOE else keys.integer("max_window_layers", 28)
    types = read_types(keys, (FULL, SLIDING), [SLIDING if window and i >= first else FULL for i in range(n_layers)])
    if SLIDING in types and not window:
        raise CheckpointError(
            f"config.json: layer type {SLIDING!r} has no window: key 'use_sliding_window' is {False!r}"
        )
    return types


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    keys.divides("num_key_value_heads", "num_attention_heads")
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    default = hidden // heads if keys.text("model_type") == MOE else HEAD_DIM
    head_dim = keys.positive("head_dim", default)
    bias = keys.flag("attention_bias", False)
    return GroupedAttention(
        hidden,
        heads,
        keys.positive("num_key_value_heads"),
        head_dim,
        normed=True,
        rotary=read_rotary(keys, head_dim),
        bias=bias,
        out_bias=bias,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def _is_routed(keys: ConfigKeys, i: int) -> bool:
    step = keys.positive("decoder_sparse_step", 1)
    return i not in keys.listed("mlp_only_layers", []) and (i + 1) % step == 0


def _read_experts(keys: ConfigKeys) -> Experts | None:
    if keys.text("model_type") != MOE:
        return None
    experts = keys.positive("num_experts", keys.integer("num_local_experts", 0))
    per_token = keys.positive("num_experts_per_tok")
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return Experts(
        keys.positive("hidden_size"),
        experts,
        per_token,
        keys.positive("moe_intermediate_size"),
        normalise=keys.flag("norm_topk_prob", False),
    )


QWEN3 = Family(
    "Qwen3",
    ("qwen3", MOE),
    read_qwen3,
    oracle="transformers",
    profile="qwen3-8b",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        Refusal("stretched positions", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "key 'rope_scaling' is "),
        Refusal("windows of no size", {"layer_types": [SLIDING, SLIDING]}, f"layer type {SLIDING!r} has no window"),
    ),
)

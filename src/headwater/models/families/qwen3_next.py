"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, each followed by a dense MLP or experts."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, MtpHead
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.models.families import reading
from headwater.models.families.family import (
    DYNAMIC_ROTATION,
    FULL,
    LINEAR,
    OTHER_ACTIVATIONS,
    OTHER_LAYERS,
    Family,
    only,
)
from headwater.models.families.qwen3 import is_routed
from headwater.models.families.rotation import read_rotary

NORM_OFFSET = 1.0


def read_qwen(keys: ConfigKeys, by_key_head: bool) -> Architecture:
    """Both families; they differ in how the rows of a Gated DeltaNet's projections are stored."""
    n_layers, interval = reading.count(keys), keys.positive("full_attention_interval", 4)
    types = reading.types(keys, (LINEAR, FULL), [LINEAR if (i + 1) % interval else FULL for i in range(n_layers)])
    mixers = {LINEAR: (read_delta_net(keys, by_key_head), "linear_attn"), FULL: (_read_attention(keys), "self_attn")}
    experts = _read_experts(keys)
    mlp = Mlp(keys.positive("hidden_size"), keys.integer("intermediate_size", 0 if experts else None))
    blocks = []
    for i, name in enumerate(types):
        ffn = experts if is_routed(keys, i) and experts else mlp
        blocks.append(reading.block(i, "input_layernorm", *mixers[name]))
        blocks.append(reading.block(i, "post_attention_layernorm", ffn, "mlp"))
    mtp = MtpHead(
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        product="mtp.fc.weight",
        blocks=(
            reading.block(0, "input_layernorm", mixers[FULL][0], "self_attn", within="mtp."),
            reading.block(0, "post_attention_layernorm", experts or mlp, "mlp", within="mtp."),
        ),
        final_norm="mtp.norm.weight",
    )
    norm_eps = keys.number("rms_norm_eps", 1e-6)
    return reading.architecture(keys, blocks, 32768, norm_eps, norm_offset=_norm_offset(keys), mtp=mtp)


def _norm_offset(keys: ConfigKeys) -> float:
    """Norms' weights are stored as w for a factor of 1 + w; a folder of MLX has 1 + w."""
    return keys.number("norm_offset", NORM_OFFSET)


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    head_dim = reading.head_dim(keys)
    return reading.attention(
        keys,
        head_dim,
        gated=True,
        normed=True,
        rotary=read_rotary(keys, head_dim, share=0.25),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        norm_offset=_norm_offset(keys),
    )


def read_delta_net(keys: ConfigKeys, by_key_head: bool = False) -> DeltaNet:
    """Read a Gated DeltaNet, whose projections may be stored key head by key head."""
    keys.divides("linear_num_key_heads", "linear_num_value_heads")
    return DeltaNet(
        keys.positive("hidden_size"),
        k_heads=keys.positive("linear_num_key_heads"),
        v_heads=keys.positive("linear_num_value_heads"),
        k_dim=keys.positive("linear_key_head_dim"),
        v_dim=keys.positive("linear_value_head_dim"),
        conv=keys.positive("linear_conv_kernel_dim"),
        by_key_head=by_key_head,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def _read_experts(keys: ConfigKeys) -> Experts | None:
    experts = keys.integer("num_experts", 0)
    if not experts:
        return None
    return reading.experts(
        keys,
        experts,
        keys.positive("num_experts_per_tok"),
        "moe_intermediate_size",
        shared=keys.positive("shared_expert_intermediate_size"),
        shared_gate=True,
        normalise=keys.flag("norm_topk_prob", True),
    )


REFUSES = (
    OTHER_ACTIVATIONS,
    only("biases of attention", "attention_bias", True, False),
    only("attention without a gate", "attn_output_gate", False, True),
    only("other gates of Gated DeltaNet's output", "output_gate_type", "sigmoid", "swish"),
    DYNAMIC_ROTATION,
    OTHER_LAYERS,
)
FAMILY = Family(
    "Qwen3-Next",
    ("qwen3_next",),
    lambda keys: read_qwen(keys, True),
    architectures=("Qwen3NextForCausalLM",),
    profile="qwen3-next-80b-a3b",
    refuses=REFUSES,
)

"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, each followed by a dense MLP or experts."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.reading import block, read_count, read_rotary, read_types
from headwater.spec import Architecture

LINEAR, FULL = "linear_attention", "full_attention"
NORM_OFFSET = 1.0


def read_qwen(keys: ConfigKeys, by_key_head: bool) -> Architecture:
    """Both families; they differ in how the rows of a Gated DeltaNet's projections are stored."""
    keys.require("hidden_act", "silu", default="silu")
    keys.require("attention_bias", False, default=False)
    n_layers, interval = read_count(keys), keys.positive("full_attention_interval", 4)
    regular = [LINEAR if (i + 1) % interval else FULL for i in range(n_layers)]
    types = read_types(keys, (LINEAR, FULL), regular)
    attention, delta_net = _read_attention(keys), _read_delta_net(keys, by_key_head)
    mixers = {LINEAR: (delta_net, "linear_attn"), FULL: (attention, "self_attn")}
    experts = _read_experts(keys)
    mlp = Mlp(keys.positive("hidden_size"), keys.integer("intermediate_size", 0 if experts else None))
    blocks = []
    for i, (name, routed) in enumerate(zip(types, _routed(keys, n_layers), strict=True)):
        mixer, at = mixers[name]
        ffn = experts if experts and routed else mlp
        blocks.append(block(i, "input_layernorm", mixer, at))
        blocks.append(block(i, "post_attention_layernorm", ffn, "mlp"))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=keys.positive("hidden_size"),
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 32768),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        norm_offset=NORM_OFFSET,
        tied=keys.flag("tie_word_embeddings", False),
    )


def _routed(keys: ConfigKeys, n_layers: int) -> list[bool]:
    """Return the layers that have experts, possibly none."""
    step = keys.positive("decoder_sparse_step", 1)
    dense = keys.listed("mlp_only_layers", [])
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    keys.divides("num_key_value_heads", "num_attention_heads")
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    head_dim = keys.positive("head_dim", hidden // heads)
    return GroupedAttention(
        hidden,
        heads,
        keys.positive("num_key_value_heads"),
        head_dim,
        gated=True,
        normed=True,
        rotary=read_rotary(keys, head_dim, share=0.25),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        norm_offset=NORM_OFFSET,
    )


def _read_delta_net(keys: ConfigKeys, by_key_head: bool) -> DeltaNet:
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
    per_token = keys.positive("num_experts_per_tok")
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return Experts(
        keys.positive("hidden_size"),
        experts,
        per_token,
        keys.positive("moe_intermediate_size"),
        shared=keys.positive("shared_expert_intermediate_size"),
        shared_gate=True,
        normalise=keys.flag("norm_topk_prob", True),
    )


REFUSES = (
    only("other activations", "hidden_act", "gelu", "silu"),
    only("biases of attention", "attention_bias", True, False),
    only("scaled rotation", "rope_type", "yarn", "default"),
    only("scaled rotation", "rope_scaling", {"type": "linear"}, None),
    Refusal(
        "layers of another kind",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer type 'sliding_attention' is not one of ['full_attention', 'linear_attention']",
    ),
)
QWEN3_NEXT = Family(
    "Qwen3-Next",
    ("qwen3_next",),
    lambda keys: read_qwen(keys, by_key_head=True),
    oracle="transformers",
    profile="qwen3-next-80b-a3b",
    refuses=REFUSES,
)

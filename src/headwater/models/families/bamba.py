"""Bamba: Mamba-2, attention in a few layers, and an MLP in each."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Mlp
from headwater.layers.mamba2 import Mamba2
from headwater.models.families.family import Family, only
from headwater.models.families.reading import block, read_count, read_rotary, read_step_limits
from headwater.spec import Architecture

EPS = 1e-5
ROTATED = 0.5  # of a head's channels


def read_bamba(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    hidden, bias = keys.positive("hidden_size"), keys.flag("mlp_bias", False)
    mamba, attention = read_mixer(keys, EPS), _read_attention(keys)
    mlp = Mlp(hidden, keys.positive("intermediate_size"), bias=bias)
    n_layers = read_count(keys)
    attends = keys.listed("attn_layer_indices", [])
    if not all(isinstance(i, int) and 0 <= i < n_layers for i in attends):
        raise CheckpointError(f"config.json: key 'attn_layer_indices' is {attends!r}, there are {n_layers} layers")
    blocks = []
    for i in range(n_layers):
        mixer = (attention, "self_attn") if i in attends else (mamba, "mamba")
        blocks.append(block(i, "input_layernorm", *mixer))
        blocks.append(block(i, "pre_ff_layernorm", mlp, "feed_forward"))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 262_144),
        norm_eps=keys.number("rms_norm_eps", EPS),
        tied=keys.flag("tie_word_embeddings", False),
        final_norm="final_layernorm.weight",
    )


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    heads, kv_heads, head_dim = read_heads(keys)
    bias = keys.flag("attention_bias", False)
    hidden, rotary = keys.positive("hidden_size"), read_rotary(keys, head_dim, share=ROTATED)
    return GroupedAttention(hidden, heads, kv_heads, head_dim, rotary=rotary, bias=bias, out_bias=bias)


def read_heads(keys: ConfigKeys) -> tuple[int, int, int]:
    """Heads of attention, those of keys and values, and their width."""
    heads = keys.positive("num_attention_heads")
    kv_heads = keys.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {kv_heads} KV heads of {heads} heads, must divide them")
    return heads, kv_heads, keys.positive("head_dim", keys.positive("hidden_size") // heads)


def read_mixer(keys: ConfigKeys, eps: float) -> Mamba2:
    """The Mamba-2 layer; `eps` is what the norms' is if unsaid. Only Falcon-H1 has the key `mamba_d_ssm`."""
    heads, wide = keys.positive("mamba_n_heads", 128), keys.positive("mamba_expand", 2) * keys.positive("hidden_size")
    inner = keys.positive("mamba_d_ssm", wide)
    head_dim, said = inner // heads, keys.optional("mamba_d_head")
    if said not in (None, "auto", head_dim) or head_dim * heads != inner:
        raise CheckpointError(f"config.json: {heads} Mamba heads of {said!r} channels are not {inner} channels")
    groups = keys.positive("mamba_n_groups", 1)
    if heads % groups:
        raise CheckpointError(f"config.json: {groups} groups of {heads} Mamba heads, must divide them")
    bias = keys.flag("mamba_proj_bias", False)
    return Mamba2(
        keys.positive("hidden_size"),
        heads,
        head_dim,
        state=keys.positive("mamba_d_state", 256),
        groups=groups,
        conv=keys.positive("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm_eps=keys.number("rms_norm_eps", eps),
        step_limits=read_step_limits(keys),
    )


BAMBA = Family(
    "Bamba",
    ("bamba",),
    read_bamba,
    oracle="transformers",
    profile="bamba-9b",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        only("scaled rotation", "rope_type", "yarn", "default"),
        only("scaled rotation", "rope_scaling", {"type": "linear"}, None),
    ),
)

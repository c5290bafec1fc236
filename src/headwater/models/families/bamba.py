"""Bamba: Mamba-2, attention in a few layers, and an MLP in each."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Mlp
from headwater.layers.mamba2 import Mamba2
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, OTHER_ACTIVATIONS, Family, Refusal
from headwater.models.families.mamba2 import mixer_of
from headwater.models.families.rotation import read_rotary

EPS = 1e-5
ROTATED = 0.5  # of a head's channels


def read_bamba(keys: ConfigKeys) -> Architecture:
    mamba, n_layers = read_mixer(keys, EPS), reading.count(keys)
    attention = read_attention(keys, rotated=ROTATED)
    keys.require("attn_rotary_emb", half := int(attention.head_dim * ROTATED), default=half)
    mlp = Mlp(mamba.hidden, keys.positive("intermediate_size"), bias=keys.flag("mlp_bias", False))
    attends = keys.listed("attn_layer_indices", [])
    if not all(isinstance(i, int) and 0 <= i < n_layers for i in attends):
        raise CheckpointError(f"config.json: key 'attn_layer_indices' is {attends!r}, there are {n_layers} layers")
    blocks = []
    for i in range(n_layers):
        mixer = (attention, "self_attn") if i in attends else (mamba, "mamba")
        blocks.append(reading.block(i, "input_layernorm", *mixer))
        blocks.append(reading.block(i, "pre_ff_layernorm", mlp, "feed_forward"))
    eps = keys.number("rms_norm_eps", EPS)
    return reading.architecture(keys, blocks, 262_144, eps, final_norm="final_layernorm.weight")


def read_heads(keys: ConfigKeys) -> tuple[int, int, int]:
    """Heads of attention, those of keys and values, and their width."""
    heads = keys.positive("num_attention_heads")
    kv_heads = keys.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {kv_heads} KV heads of {heads} heads, must divide them")
    return heads, kv_heads, reading.head_dim(keys)


def read_attention(keys: ConfigKeys, rotated: float | None = 1.0) -> GroupedAttention:
    """Return attention with biases of all its products, or of none; a share of channels is `rotated`, None: none."""
    (heads, kv_heads, head_dim), bias = read_heads(keys), keys.flag("attention_bias", False)
    rotary = None if rotated is None else read_rotary(keys, head_dim, rotated)
    hidden = keys.positive("hidden_size")
    return GroupedAttention(hidden, heads, kv_heads, head_dim, rotary=rotary, bias=bias, out_bias=bias)


def read_mixer(keys: ConfigKeys, eps: float) -> Mamba2:
    """The Mamba-2 layer; `eps` is used if the norms' key is missing. Only Falcon-H1 has the key `mamba_d_ssm`."""
    heads, wide = keys.positive("mamba_n_heads", 128), keys.positive("mamba_expand", 2) * keys.positive("hidden_size")
    inner = keys.positive("mamba_d_ssm", wide)
    head_dim, said = inner // heads, keys.optional("mamba_d_head")
    if said not in (None, "auto", head_dim) or head_dim * heads != inner:
        raise CheckpointError(f"config.json: {heads} Mamba heads of {said!r} channels are not {inner} channels")
    return mixer_of(
        keys,
        heads,
        head_dim,
        groups=keys.positive("mamba_n_groups", 1),
        bias=keys.flag("mamba_proj_bias", False),
        state=keys.positive("mamba_d_state", 256),
        conv=keys.positive("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        norm_eps=keys.number("rms_norm_eps", eps),
    )


FAMILY = Family(
    "Bamba",
    ("bamba",),
    read_bamba,
    architectures=("BambaForCausalLM",),
    profile="bamba-9b",
    refuses=(
        OTHER_ACTIVATIONS,
        DYNAMIC_ROTATION,
        Refusal("rotation of another share of channels", {"attn_rotary_emb": 7}, "key 'attn_rotary_emb' is 7, only "),
    ),
)

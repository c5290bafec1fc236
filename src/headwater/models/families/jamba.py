"""Jamba: Mamba-1 and attention without positions, each followed by a dense MLP or experts."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.mamba import Mamba
from headwater.models.families.family import Family, only
from headwater.models.families.reading import block, read_count
from headwater.spec import Architecture


def read_jamba(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    keys.require("sliding_window", None, default=None)
    n_layers, hidden = read_count(keys), keys.positive("hidden_size")
    attends, routes = _every(keys, "attn_layer", 8, 4), _every(keys, "expert_layer", 2, 1)
    mamba, attention, experts = _read_mamba(keys), _read_attention(keys), _read_experts(keys)
    mlp = Mlp(hidden, keys.positive("intermediate_size"))
    blocks = []
    for i in range(n_layers):
        mixer, at = (attention, "self_attn") if i in attends else (mamba, "mamba")
        blocks.append(block(i, "input_layernorm", mixer, at))
        ffn = experts if experts and i in routes else mlp
        blocks.append(block(i, "pre_ff_layernorm", ffn, "feed_forward", gate="router"))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 262_144),
        norm_eps=_norm_eps(keys),
        tied=keys.flag("tie_word_embeddings", False),
        final_norm="final_layernorm.weight",
    )


def _norm_eps(keys: ConfigKeys) -> float:
    return keys.number("rms_norm_eps", 1e-6)


def _every(keys: ConfigKeys, kind: str, period: int, offset: int) -> range:
    """Return the layers of a kind: one in `…_period`, from `…_offset` on."""
    period, offset = keys.positive(f"{kind}_period", period), keys.integer(f"{kind}_offset", offset)
    if not 0 <= offset < period:
        raise CheckpointError(f"config.json: key '{kind}_offset' is {offset}, must be below '{kind}_period', {period}")
    return range(offset, keys.positive("num_hidden_layers"), period)


def _read_mamba(keys: ConfigKeys) -> Mamba:
    keys.require("mamba_inner_layernorms", True, default=True)
    hidden = keys.positive("hidden_size")
    return Mamba(
        hidden,
        inner=keys.positive("mamba_expand", 2) * hidden,
        state=keys.positive("mamba_d_state", 16),
        conv=keys.positive("mamba_d_conv", 4),
        step_rank=keys.automatic("mamba_dt_rank", -(-hidden // 16)),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=keys.flag("mamba_proj_bias", False),
        normed=True,
        norm_eps=_norm_eps(keys),
    )


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    keys.divides("num_key_value_heads", "num_attention_heads")
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    return GroupedAttention(
        hidden, heads, keys.positive("num_key_value_heads"), keys.positive("head_dim", hidden // heads)
    )


def _read_experts(keys: ConfigKeys) -> Experts | None:
    """Weights of the chosen ones are their softmax over all experts."""
    experts, per_token = keys.positive("num_experts", 16), keys.positive("num_experts_per_tok", 2)
    if experts == 1:
        return None
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return Experts(
        keys.positive("hidden_size"), experts, per_token, keys.positive("intermediate_size"), normalise=False
    )


JAMBA = Family(
    "Jamba",
    ("jamba",),
    read_jamba,
    oracle="transformers, in one full pass: from a cached state it goes on wrongly",
    profile="jamba-1.5-mini",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        only("windows of attention", "sliding_window", 4096, None),
        only("steps, B and C without norms", "mamba_inner_layernorms", False, True),
    ),
)

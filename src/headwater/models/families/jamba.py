"""Jamba: Mamba-1 and attention without positions, each followed by a dense MLP or experts."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.mamba import Mamba
from headwater.models.families import reading
from headwater.models.families.family import OTHER_ACTIVATIONS, Family, only


def read_jamba(keys: ConfigKeys) -> Architecture:
    n_layers, norm_eps = reading.count(keys), keys.number("rms_norm_eps", 1e-6)
    attends, routes = _every(keys, "attn_layer", 8, 4), _every(keys, "expert_layer", 2, 1)
    mamba, attention = _read_mamba(keys, norm_eps), reading.attention(keys, reading.head_dim(keys))
    experts, mlp = _read_experts(keys), Mlp(mamba.hidden, keys.positive("intermediate_size"))
    blocks = []
    for i in range(n_layers):
        mixer = (attention, "self_attn") if i in attends else (mamba, "mamba")
        blocks.append(reading.block(i, "input_layernorm", *mixer))
        ffn = experts if experts and i in routes else mlp
        blocks.append(reading.block(i, "pre_ff_layernorm", ffn, "feed_forward", gate="router"))
    return reading.architecture(keys, blocks, 262_144, norm_eps, final_norm="final_layernorm.weight")


def _every(keys: ConfigKeys, kind: str, period: int, offset: int) -> range:
    """Return the layers of a kind: one in `…_period`, from `…_offset` on."""
    period, offset = keys.positive(f"{kind}_period", period), keys.integer(f"{kind}_offset", offset)
    if not 0 <= offset < period:
        raise CheckpointError(f"config.json: key '{kind}_offset' is {offset}, must be below '{kind}_period', {period}")
    return range(offset, keys.positive("num_hidden_layers"), period)


def _read_mamba(keys: ConfigKeys, norm_eps: float) -> Mamba:
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
        norm_eps=norm_eps,
    )


def _read_experts(keys: ConfigKeys) -> Experts | None:
    """Weights of the chosen ones are their softmax over all experts."""
    experts, per_token = keys.positive("num_experts", 16), keys.positive("num_experts_per_tok", 2)
    return reading.experts(keys, experts, per_token, normalise=False) if experts > 1 else None


FAMILY = Family(
    "Jamba",
    ("jamba",),
    read_jamba,
    architectures=("JambaForCausalLM",),
    profile="jamba-1.5-mini",
    refuses=(
        OTHER_ACTIVATIONS,
        only("windows of attention", "sliding_window", 4096, None),
        only("steps, B and C without norms", "mamba_inner_layernorms", False, True),
    ),
    oracle="transformers, in one full pass: from a cached state it continues wrongly",
)

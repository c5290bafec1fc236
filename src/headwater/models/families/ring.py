"""Ring-linear 2.0: groups of Lightning attention, each closed by a layer of grouped attention; experts.

Keys and formulas are those of the configuration and model code that inclusionAI publishes with Ring-mini-linear-2.0 and
Ring-flash-linear-2.0, and of their report (arXiv 2510.19338).
"""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, MtpHead
from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.layers.mla import LatentAttention
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, OTHER_ACTIVATIONS, Family, Refusal, only
from headwater.models.families.rotation import read_rotary

MIXER_NAMES = {"qkv_proj": "query_key_value", "o_proj": "dense", "q_norm": "query_layernorm", "k_norm": "key_layernorm"}
EXPERT_NAMES = {"correction": "gate.expert_bias", "shared_expert": "shared_experts"}


def read_ring(keys: ConfigKeys) -> Architecture:
    rotary = read_rotary(keys, reading.head_dim(keys), theta=600_000.0)
    attention, lightning = _read_attention(keys, rotary), read_lightning(keys, rotary)
    return in_groups(keys, attention, MIXER_NAMES, lightning, keys.integer("first_k_dense_replace", 0))


def in_groups(
    keys: ConfigKeys,
    attention: GroupedAttention | LatentAttention,
    names: dict[str, str],
    lightning: Lightning,
    dense: int,
) -> Architecture:
    """Build groups of Lightning attention, each closed by a layer of `attention`; the first `dense` have no experts."""
    n_layers, experts = reading.count(keys), _read_experts(keys)
    mlp, blocks = Mlp(attention.hidden, keys.positive("intermediate_size")), []
    for i in range(n_layers):
        mixer: Layer = attention
        of_mixer = names
        if not _is_full(i, n_layers, keys.positive("layer_group_size")):
            mixer, of_mixer = replace(lightning, slopes=_slopes(i, n_layers, lightning.heads)), MIXER_NAMES
        blocks.append(reading.block(i, "input_layernorm", mixer, "attention", **of_mixer))
        ffn, of_ffn = (mlp, {}) if i < dense else (experts, EXPERT_NAMES)
        blocks.append(reading.block(i, "post_attention_layernorm", ffn, "mlp", **of_ffn))
    eps, mtp = keys.number("rms_norm_eps", 1e-6), read_mtp(n_layers, attention, experts, names)
    return reading.architecture(keys, blocks, 32768, eps, embedding="word_embeddings.weight", mtp=mtp)


def read_mtp(n_layers: int, attention: Layer, experts: Experts, mixer_names: dict[str, str]) -> MtpHead:
    """Build the MTP head after `n_layers` layers: one more layer, with attention over all tokens and experts."""
    at = f"model.layers.{n_layers}"
    blocks = (
        reading.block(n_layers, "input_layernorm", attention, "attention", "model.", **mixer_names),
        reading.block(n_layers, "post_attention_layernorm", experts, "mlp", "model.", **EXPERT_NAMES),
    )
    return reading.mtp_head(at, blocks, at)


def _is_full(i: int, n_layers: int, group: int) -> bool:
    """Return True for the last layer of each group, and for all layers after the last whole group."""
    return (i + 1) % group == 0 or i >= n_layers // group * group


def _slopes(i: int, n_layers: int, heads: int) -> tuple[float, ...]:
    """Decays are slower in deeper layers. The first one's factor is above 1: the published code counts from layer 1."""
    depth = 1 - (i - 1) / max(1, n_layers - 1) + 1e-5
    return tuple(depth * slope for slope in alibi_slopes(heads))


def _read_attention(keys: ConfigKeys, rotary: Rotary) -> GroupedAttention:
    return reading.attention(
        keys,
        reading.head_dim(keys),
        normed=keys.flag("use_qk_norm", True),
        rotary=rotary,
        bias=keys.flag("use_qkv_bias", False),
        out_bias=keys.flag("use_bias", False),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def read_lightning(keys: ConfigKeys, rotary: Rotary) -> Lightning:
    heads, head_dim = keys.positive("num_attention_heads"), reading.head_dim(keys)
    for fewer in ("linear_key_value_heads", "num_kv_heads_for_linear_attn"):
        keys.require(fewer, heads, default=heads)
    groups = keys.positive("group_norm_size", 1)
    if heads * head_dim % groups:
        raise CheckpointError(f"config.json: key 'group_norm_size' is {groups}, must divide {heads * head_dim}")
    return Lightning(
        keys.positive("hidden_size"),
        heads,
        head_dim,
        scale=head_dim**-0.5,
        activated=keys.flag("linear_silu", False),
        normed=keys.flag("use_qk_norm", True),
        rotary=rotary if keys.flag("linear_rope", True) else None,
        bias=keys.flag("use_qkv_bias", False),
        out_bias=keys.flag("use_bias", False),
        norm_groups=groups,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def _read_experts(keys: ConfigKeys) -> Experts:
    """Groups of experts, a factor, and a shared expert."""
    keys.require("score_function", "sigmoid", default=None)
    experts = reading.grouped_experts(
        keys,
        per_token=keys.positive("num_experts_per_tok"),
        groups=keys.positive("n_group"),
        chosen=keys.positive("topk_group"),
        shared=keys.integer("num_shared_experts", 0),
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    keys.require("moe_shared_expert_intermediate_size", experts.intermediate, default=experts.intermediate)
    return experts


FEWER_LINEAR_HEADS = Refusal(
    "fewer heads of keys than of queries", {"num_kv_heads_for_linear_attn": 1}, "'num_kv_heads_for_linear_attn' is 1"
)
OTHER_SHARED_EXPERTS = Refusal(
    "shared experts of another size than routed ones",
    {"moe_shared_expert_intermediate_size": 7},
    "key 'moe_shared_expert_intermediate_size' is 7, only ",
)
OTHER_ROUTERS = (  # and heads, as in inclusionAI's code and in SGLang
    only("several routers", "multi_gate", True, False),
    only("several routers", "router_type", "MultiRouter", "topN"),
    only("other routers", "score_function", "softmax", "sigmoid"),
    only("other routers", "moe_router_enable_expert_bias", False, True),
    only("no shared experts in spite of their number", "moe_router_enable_shared_expert", False, True),
    only("norms of the head's weights", "norm_head", True, False),
)
LIMIT_KEYS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")  # of routed and of shared experts
LIMITED_EXPERTS = tuple(only("limited activations of experts", key, [4.0], None) for key in LIMIT_KEYS)
FAMILY = Family(
    "Ring-linear",
    ("bailing_moe_linear",),
    read_ring,
    architectures=("BailingMoeLinearV2ForCausalLM", "BailingMoeLinearForCausalLM"),
    profile="ring-mini-linear-2.0",
    refuses=(
        OTHER_ACTIVATIONS,
        only("sliding windows", "use_sliding_window", True, False),
        DYNAMIC_ROTATION,
        *OTHER_ROUTERS,
        only("weights of experts that do not sum to one", "norm_topk_prob", False, True),
        OTHER_SHARED_EXPERTS,
        FEWER_LINEAR_HEADS,
        *LIMITED_EXPERTS,
    ),
    oracle="its recurrence token by token in plain torch, from the published configuration and model code",
)

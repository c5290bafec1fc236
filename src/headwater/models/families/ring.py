"""Ring-linear 2.0: groups of Lightning attention, each closed by a layer of grouped attention; experts.

Keys and formulas are those of the configuration and model code that inclusionAI publishes with Ring-mini-linear-2.0 and
Ring-flash-linear-2.0, and of their report (arXiv 2510.19338).
"""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.reading import block, read_count, read_rotary
from headwater.spec import Architecture

MIXER_NAMES = {
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
}
EXPERT_NAMES = {"correction": "gate.expert_bias", "shared_expert": "shared_experts"}


def read_ring(keys: ConfigKeys) -> Architecture:
    keys.require("hidden_act", "silu", default="silu")
    keys.require("use_sliding_window", False, default=False)
    n_layers, hidden = read_count(keys), keys.positive("hidden_size")
    rotary = read_rotary(keys, _head_dim(keys), share=1.0, theta=600_000.0)
    attention, lightning = _read_attention(keys, rotary), _read_lightning(keys, rotary)
    experts, mlp = _read_experts(keys), Mlp(hidden, keys.positive("intermediate_size"))
    dense = keys.integer("first_k_dense_replace", 0)
    blocks = []
    for i in range(n_layers):
        mixer: Layer = attention
        if not _is_full(i, n_layers, keys.positive("layer_group_size")):
            mixer = replace(lightning, slopes=_slopes(i, n_layers, lightning.heads))
        blocks.append(block(i, "input_layernorm", mixer, "attention", **MIXER_NAMES))
        ffn, names = (mlp, {}) if i < dense else (experts, EXPERT_NAMES)
        blocks.append(block(i, "post_attention_layernorm", ffn, "mlp", **names))
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        max_length=keys.positive("max_position_embeddings", 32768),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings", False),
        embedding="word_embeddings.weight",
    )


def _is_full(i: int, n_layers: int, group: int) -> bool:
    """Return True for the last layer of each group, and for all layers after the last whole group."""
    return (i + 1) % group == 0 or i >= n_layers // group * group


def _slopes(i: int, n_layers: int, heads: int) -> tuple[float, ...]:
    """Decays are slower in deeper layers. The first one's factor is above 1: the published code counts from layer 1."""
    depth = 1 - (i - 1) / max(1, n_layers - 1) + 1e-5
    return tuple(depth * slope for slope in alibi_slopes(heads))


def _read_attention(keys: ConfigKeys, rotary: Rotary) -> GroupedAttention:
    keys.divides("num_key_value_heads", "num_attention_heads")
    return GroupedAttention(
        keys.positive("hidden_size"),
        keys.positive("num_attention_heads"),
        keys.positive("num_key_value_heads"),
        _head_dim(keys),
        normed=keys.flag("use_qk_norm", True),
        rotary=rotary,
        bias=keys.flag("use_qkv_bias", False),
        out_bias=keys.flag("use_bias", False),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def _read_lightning(keys: ConfigKeys, rotary: Rotary) -> Lightning:
    heads, head_dim = keys.positive("num_attention_heads"), _head_dim(keys)
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


def _head_dim(keys: ConfigKeys) -> int:
    return keys.positive("head_dim", keys.positive("hidden_size") // keys.positive("num_attention_heads"))


def _read_experts(keys: ConfigKeys) -> Experts:
    """Sigmoid scores, a correction for the choice, groups of experts, a factor, and a shared expert."""
    keys.require("score_function", "sigmoid", default=None)
    keys.require("moe_router_enable_expert_bias", True, default=True)
    keys.require("norm_topk_prob", True, default=True)
    experts, per_token, groups = (keys.positive(key) for key in ("num_experts", "num_experts_per_tok", "n_group"))
    chosen, width = keys.positive("topk_group"), keys.positive("moe_intermediate_size")
    keys.require("moe_shared_expert_intermediate_size", width, default=width)
    if experts % groups or chosen > groups or per_token > experts // groups * chosen:
        raise CheckpointError(
            f"config.json: {per_token} experts a token of {chosen} groups of {groups}, in which {experts} experts are"
        )
    return Experts(
        keys.positive("hidden_size"),
        experts,
        per_token,
        width,
        shared=width * keys.integer("num_shared_experts", 0),
        scores="sigmoid",
        corrected=True,
        groups=groups,
        groups_per_token=chosen,
        scale=keys.number("routed_scaling_factor", 1.0),
    )


REFUSES = (
    only("other activations", "hidden_act", "gelu", "silu"),
    only("sliding windows", "use_sliding_window", True, False),
    only("scaled rotation", "rope_scaling", {"type": "yarn", "factor": 4.0}, None),
    only("other routers", "score_function", "softmax", "sigmoid"),
    only("other routers", "moe_router_enable_expert_bias", False, True),
    only("weights of experts that do not sum to one", "norm_topk_prob", False, True),
    Refusal(
        "shared experts of another size than routed ones",
        {"moe_shared_expert_intermediate_size": 7},
        "key 'moe_shared_expert_intermediate_size' is 7, only ",
    ),
)
RING = Family(
    "Ring-linear",
    ("bailing_moe_linear",),
    read_ring,
    oracle="its recurrence token by token in plain torch, from the published configuration and model code",
    profile="ring-mini-linear-2.0",
    refuses=REFUSES,
)

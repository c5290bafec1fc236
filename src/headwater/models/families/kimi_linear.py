"""Kimi-Linear: Kimi Delta Attention, every few layers latent attention without positions; experts.

Keys and names are those of the checkpoint that Moonshot AI publishes, and of transformers where it writes others.
"""

from __future__ import annotations

from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.families import reading
from headwater.models.families.family import FULL, LINEAR, OTHER_ACTIVATIONS, Family, Refusal, only

DENSE, SPARSE = "dense", "sparse"
PLACES = ("mlp", "block_sparse_moe")  # of a dense layer's MLP; transformers writes it to the second
MLP_NAMES = tuple((name, f"{at}.{name}") for name in ("gate_proj", "up_proj", "down_proj") for at in PLACES)
EXPERT_NAMES = {
    "correction": "gate.e_score_correction_bias",
    "shared_expert": "shared_experts",
    "expert.gate_proj": "w1",
    "expert.up_proj": "w3",
    "expert.down_proj": "w2",
}
NORM_EPS = 1e-5


def read_kimi(keys: ConfigKeys) -> Architecture:
    n_layers = reading.count(keys)
    delta, types = _read_delta(keys, n_layers)
    latent, experts = read_latent(keys), read_experts(keys)
    mlp = Mlp(keys.positive("hidden_size"), keys.positive("intermediate_size"))
    blocks = []
    for i, (kind, ffn) in enumerate(zip(types, read_feed_forwards(keys, n_layers), strict=True)):
        blocks.append(reading.block(i, "input_layernorm", delta if kind == LINEAR else latent, "self_attn"))
        if ffn == SPARSE:
            blocks.append(reading.block(i, "post_attention_layernorm", experts, "block_sparse_moe", **EXPERT_NAMES))
        else:
            norm = f"layers.{i}.post_attention_layernorm.weight"
            blocks.append(Block(norm, (Part(mlp, f"layers.{i}", MLP_NAMES),)))
    length_key = reading.said(keys, "model_max_length", "max_position_embeddings")
    return reading.architecture(keys, blocks, 32768, keys.number("rms_norm_eps", NORM_EPS), length_key)


def _read_delta(keys: ConfigKeys, n_layers: int) -> tuple[DeltaAttention, tuple[str, ...]]:
    """The recurrent layer, and what each layer is; said in an object of its own, or with the other keys."""
    own = keys.optional("linear_attn_config")
    if own is None:
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        return _delta(keys, keys, *names), reading.types(keys, (LINEAR, FULL), [""] * n_layers)
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: key 'linear_attn_config' is {own!r}, must be an object")
    inner = ConfigKeys(own)
    inner.require("use_full_rank_gate", False, default=False)
    numbered = {key: inner.listed(key, []) for key in ("kda_layers", "full_attn_layers")}
    said = sorted(numbered["kda_layers"] + numbered["full_attn_layers"], key=str)
    if said != sorted(range(1, n_layers + 1), key=str):
        raise CheckpointError(f"config.json: key 'linear_attn_config' names layers {said}, there are {n_layers}")
    types = tuple(FULL if i + 1 in numbered["full_attn_layers"] else LINEAR for i in range(n_layers))
    return _delta(keys, inner, "num_heads", "head_dim", "short_conv_kernel_size"), types


def _delta(keys: ConfigKeys, sizes: ConfigKeys, heads: str, head_dim: str, conv: str) -> DeltaAttention:
    return DeltaAttention(
        keys.positive("hidden_size"),
        sizes.positive(heads),
        sizes.positive(head_dim),
        sizes.positive(conv, 4),
        norm_eps=keys.number("rms_norm_eps", NORM_EPS),
        lowest=sizes.number("gate_lower_bound") if sizes.optional("gate_lower_bound") is not None else None,
    )


def read_latent(keys: ConfigKeys, **fields: Any) -> LatentAttention:
    """Read sizes, here and for Ling; `fields` are others of `LatentAttention`."""
    heads = keys.positive("num_attention_heads")
    keys.require("num_key_value_heads", heads, default=heads)
    return LatentAttention(
        keys.positive("hidden_size"),
        heads,
        latent=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        v_dim=keys.positive("v_head_dim"),
        q_latent=keys.integer("q_lora_rank", 0),
        bias=keys.flag("attention_bias", False),
        **fields,
    )


def read_feed_forwards(keys: ConfigKeys, n_layers: int) -> tuple[str, ...]:
    """Read the kind of each feed-forward; by default all but the first few have experts."""
    keys.require("moe_layer_freq", 1, default=1)
    dense = keys.integer("first_k_dense_replace", 1)
    regular = [DENSE if i < dense else SPARSE for i in range(n_layers)]
    return reading.types(keys, (DENSE, SPARSE), regular, key="mlp_layer_types")


def read_experts(keys: ConfigKeys) -> Experts:
    """Groups of experts, a factor, and shared experts as one."""
    return reading.grouped_experts(
        keys,
        per_token=keys.positive(reading.said(keys, "num_experts_per_token", "num_experts_per_tok")),
        groups=keys.positive(reading.said(keys, "num_expert_group", "n_group"), 1),
        chosen=keys.positive("topk_group", 1),
        shared=keys.integer("num_shared_experts", 1),
        normalise=keys.flag(reading.said(keys, "moe_renormalize", "norm_topk_prob"), True),
        scale=keys.number("routed_scaling_factor"),
    )


FEWER_KV_HEADS = Refusal(
    "fewer heads of keys than of queries", {"num_key_value_heads": 3}, "key 'num_key_value_heads' is 3, only "
)
FAMILY = Family(
    "Kimi-Linear",
    ("kimi_linear",),
    read_kimi,
    architectures=("KimiLinearForCausalLM",),
    profile="kimi-linear-48b-a3b",
    refuses=(
        OTHER_ACTIVATIONS,
        only("rotation in latent attention", "mla_use_nope", False, True),
        only("gates of latent attention", "mla_use_output_gate", True, False),
        only("other routers", "moe_router_activation_func", "softmax", "sigmoid"),
        only("other routers", "use_grouped_topk", False, True),
        only("other routers", "topk_method", "greedy", "noaux_tc"),
        only("experts of another width than the model's", "routed_expert_hidden_size", 16, None),
        only("attention over the layers before", "attn_res_block_size", 2, None),
        only("experts in some of the later layers only", "moe_layer_freq", 2, 1),
        FEWER_KV_HEADS,
        Refusal(
            "layers of another kind",
            {"layer_types": [LINEAR, "sliding_attention"]},
            "layer type 'sliding_attention' is not one of ",
        ),
        Refusal(
            "layers in neither list",
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [], "num_heads": 2, "head_dim": 16}},
            "key 'linear_attn_config' names layers [1], there are 2",
        ),
    ),
)

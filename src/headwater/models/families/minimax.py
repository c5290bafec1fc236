"""MiniMax-Text-01 and M1: Lightning attention, full attention every eighth layer, experts, and scaled post-norm sums.

Each block is x ← α · norm(x) + β · f(norm(x)). Checkpoints come with the keys that their own code reads (`minimax_m1`,
`minimax_text_01`) or with those of transformers (`minimax`); their tensors have the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, Block
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.lightning import Lightning, alibi_slopes, geometric_slopes
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
from headwater.models.families.rotation import read_rotary

EXPERTS = "experts"
LINEAR_NAMES = {"g_proj": "output_gate", "g_norm": "norm", "o_proj": "out_proj"}
EXPERT_NAMES = {"expert.gate_proj": "w1", "expert.up_proj": "w3", "expert.down_proj": "w2"}


@dataclass(frozen=True)
class Dialect:
    """Differences between the two kinds of config.json, and between the codes that read them."""

    alpha: str  # of a block's norm(x), with the block's name put in
    beta: str  # of what it adds
    names: dict[str, str]  # of the blocks
    slopes: Callable[[int], list[float]]  # of a layer's heads
    last: float  # what makes the last layer's decay next to nothing: its number, or a little more


TRANSFORMERS_NAMES = {LINEAR: "linear_attn", FULL: "full_attn", EXPERTS: "mlp"}
TRANSFORMERS = Dialect("{}_alpha_factor", "{}_beta_factor", TRANSFORMERS_NAMES, geometric_slopes, 1e-5)
PUBLISHED = Dialect(
    "layernorm_{}_alpha", "layernorm_{}_beta", {LINEAR: LINEAR, FULL: FULL, EXPERTS: "mlp"}, alibi_slopes, 0.0
)


def read_transformers(keys: ConfigKeys) -> Architecture:
    types = reading.types(keys, (LINEAR, FULL), [LINEAR if i % 2 else FULL for i in range(reading.count(keys))])
    return _read(keys, types, TRANSFORMERS, post_norm=True)


def read_published(keys: ConfigKeys) -> Architecture:
    codes = keys.listed("attn_type_list", [])
    if len(codes) != reading.count(keys) or any(code not in (0, 1) for code in codes):
        raise CheckpointError(f"config.json: key 'attn_type_list' is {codes!r}, must be 0 or 1 for each layer")
    keys.require("shared_intermediate_size", 0, default=0)
    return _read(keys, tuple((LINEAR, FULL)[code] for code in codes), PUBLISHED, keys.flag("postnorm", False))


def _read(keys: ConfigKeys, types: tuple[str, ...], dialect: Dialect, post_norm: bool) -> Architecture:
    attention, lightning, experts = _read_attention(keys), _read_lightning(keys), _read_experts(keys)
    slopes = dialect.slopes(lightning.heads)
    blocks = []
    for i, kind in enumerate(types):
        if kind == LINEAR:
            depth = 1 - i / (len(types) - 1 + dialect.last or 1) + 1e-5  # decays are slower in deeper layers
            mixer = replace(lightning, slopes=tuple(depth * slope for slope in slopes))
            mixes = reading.block(i, "input_layernorm", mixer, "self_attn", **LINEAR_NAMES)
        else:
            mixes = reading.block(i, "input_layernorm", attention, "self_attn")
        routes = reading.block(i, "post_attention_layernorm", experts, "block_sparse_moe", **EXPERT_NAMES)
        for added, name in ((mixes, kind), (routes, EXPERTS)):
            blocks.append(_scaled(added, keys, dialect, name, post_norm))
    return reading.architecture(keys, blocks, 131072, keys.number("rms_norm_eps", 1e-5))


def _scaled(added: Block, keys: ConfigKeys, dialect: Dialect, name: str, post_norm: bool) -> Block:
    alpha, beta = (keys.number(key.format(dialect.names[name]), 1.0) for key in (dialect.alpha, dialect.beta))
    return replace(added, keep=alpha, scale=beta, keeps_normed=post_norm)


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    head_dim = reading.head_dim(keys)
    share = keys.positive("rotary_dim", head_dim) / head_dim
    return reading.attention(keys, head_dim, rotary=read_rotary(keys, head_dim, share, theta=1e6))


def _read_lightning(keys: ConfigKeys) -> Lightning:
    return Lightning(
        keys.positive("hidden_size"),
        keys.positive("num_attention_heads"),
        reading.head_dim(keys),
        activated=True,
        normed=False,
        by_head=True,
        norm_eps=1e-6,  # of its own norm, whatever rms_norm_eps is
    )


def _read_experts(keys: ConfigKeys) -> Experts:
    return reading.experts(keys, keys.positive("num_local_experts", 8), keys.positive("num_experts_per_tok", 2))


READ = {"minimax": read_transformers, "minimax_text_01": read_published, "minimax_m1": read_published}
FAMILY = Family(
    "MiniMax",
    tuple(READ),
    lambda keys: READ[keys.text("model_type")](keys),
    architectures=("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    profile="minimax-m1",
    refuses=(
        OTHER_ACTIVATIONS,
        only("sliding windows", "sliding_window", 4096, None),
        DYNAMIC_ROTATION,
        OTHER_LAYERS,
    ),
)

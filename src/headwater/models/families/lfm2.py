"""LFM2 and LFM2.5, dense and with experts: gated short convolutions and attention, each followed by a feed-forward."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.short_conv import ShortConv
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, FULL, Family, Refusal, only
from headwater.models.families.rotation import read_rotary

CONV = "conv"
MOE = "lfm2_moe"
ROPE_THETA = 1e6
NORM_EPS = 1e-5
ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MLP_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
EXPERT_NAMES = {"correction": "expert_bias", **{f"expert.{ours}": theirs for ours, theirs in MLP_NAMES.items()}}


def read_lfm2(keys: ConfigKeys) -> Architecture:
    hidden, head_dim, eps = keys.positive("hidden_size"), reading.head_dim(keys), keys.number("norm_eps", NORM_EPS)
    for key in ("conv_dim", "conv_dim_out"):
        keys.require(key, hidden, default=hidden)
    convolution = ShortConv(hidden, keys.positive("conv_L_cache", 3), keys.flag("conv_bias", False))
    rotary = read_rotary(keys, head_dim, theta=ROPE_THETA)
    attention = reading.attention(keys, head_dim, normed=True, rotary=rotary, norm_eps=eps)
    blocks = []
    for i, kind in enumerate(_read_types(keys)):
        if kind == CONV:
            blocks.append(reading.block(i, "operator_norm", convolution, "conv", conv1d="conv"))
        else:
            blocks.append(reading.block(i, "operator_norm", attention, "self_attn", **ATTENTION_NAMES))
        ffn = _read_feed_forward(keys, i)
        names = EXPERT_NAMES if isinstance(ffn, Experts) else MLP_NAMES
        blocks.append(reading.block(i, "ffn_norm", ffn, "feed_forward", **names))
    tied = keys.flag("tie_embedding", True)
    return reading.architecture(keys, blocks, 128_000, eps, tied=tied, final_norm="embedding_norm.weight")


def _read_types(keys: ConfigKeys) -> tuple[str, ...]:
    """Read layer types; without them, the layers of `full_attn_idxs` have attention, by default all."""
    n_layers = reading.count(keys)
    attends = keys.listed("full_attn_idxs", [*range(n_layers)])
    return reading.types(keys, (CONV, FULL), [FULL if i in attends else CONV for i in range(n_layers)])


def _read_feed_forward(keys: ConfigKeys, i: int) -> Mlp | Experts:
    """Read the i-th feed-forward: all of a dense model's are MLPs, of one with experts the first few."""
    hidden = keys.positive("hidden_size")
    if keys.text("model_type") != MOE:
        return Mlp(hidden, _read_width(keys))
    if i < keys.integer("num_dense_layers", 2):
        return Mlp(hidden, keys.positive("intermediate_size"))
    return reading.experts(
        keys,
        keys.positive("num_experts", 32),
        keys.positive("num_experts_per_tok", 4),
        "moe_intermediate_size",
        normalise=keys.flag("norm_topk_prob", True),
        sum_epsilon=1e-6,
        scores="sigmoid",
        corrected=keys.flag("use_expert_bias", True),
        scale=keys.number("routed_scaling_factor", 1.0),
    )


def _read_width(keys: ConfigKeys) -> int:
    """Read the width of a dense model's MLPs: two thirds of the stated one, times a factor, up to a whole multiple."""
    width = keys.positive(reading.said(keys, "block_ff_dim", "intermediate_size"))
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    multiple, factor = keys.positive("block_multiple_of", 256), keys.number("block_ffn_dim_multiplier", 1.0)
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


FAMILY = Family(
    "LFM2",
    ("lfm2", MOE),
    read_lfm2,
    architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    profile="lfm2-1.2b",
    refuses=(
        DYNAMIC_ROTATION,
        only("MLPs without a gate", "block_use_swiglu", False, True),
        only("attention without positions", "use_pos_enc", False, True),
        Refusal("convolutions of another width", {"conv_dim": 32}, "key 'conv_dim' is 32, only "),
        Refusal(
            "layers of another kind",
            {"layer_types": ["sliding_attention", FULL]},
            f"layer type 'sliding_attention' is not one of {[CONV, FULL]}",
        ),
    ),
)

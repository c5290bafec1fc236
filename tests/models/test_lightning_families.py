"""Configurations as MiniMax and inclusionAI publish them, against the lab's profiles and against transformers' keys."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.lightning import Lightning
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES

Config = dict[str, Any]
MINIMAX_M1: Config = {
    "model_type": "minimax_m1",
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}
RING_MINI: Config = {
    "model_type": "bailing_moe_linear",
    "first_k_dense_replace": 1,
    "group_norm_size": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "layer_group_size": 5,
    "linear_silu": False,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 157184,
}


@pytest.mark.parametrize(("config", "name"), [(MINIMAX_M1, "minimax-m1"), (RING_MINI, "ring-mini-linear-2.0")])
def test_published_model_has_the_costs_of_its_profile(config: Config, name: str) -> None:
    spec, profile = read_config(config, "bfloat16"), PROFILES[name]
    assert spec.kv_bytes_per_token == profile.kv_bytes_per_token
    assert spec.checkpoint_bytes == profile.checkpoint_bytes
    assert spec.flops == profile.flops
    assert spec.parameters_by_kind() == profile.parameters_by_kind()
    assert spec.layers_by_kind == profile.layers_by_kind


def test_only_the_first_channels_of_minimax_rotate() -> None:
    attention = next(
        layer for layer in read_config(MINIMAX_M1, "bfloat16").layers if isinstance(layer, GroupedAttention)
    )
    assert attention.rotary == Rotary(64, 1e7)


def test_minimax_is_equal_by_own_keys_and_by_transformers_keys() -> None:
    """The decay of the last layer is all that differs: next to nothing by both, as full attention closes the model."""
    theirs = MINIMAX_M1 | {"model_type": "minimax"}
    codes = theirs.pop("attn_type_list")
    theirs["layer_types"] = [("linear_attention", "full_attention")[code] for code in codes]
    for block, factor in (("linear_attention", "linear_attn"), ("full_attention", "full_attn"), ("mlp", "mlp")):
        theirs[f"{factor}_alpha_factor"] = theirs.pop(f"layernorm_{block}_alpha")
        theirs[f"{factor}_beta_factor"] = theirs.pop(f"layernorm_{block}_beta")
    for ours, other in zip(*(read_config(c, "bfloat16").blocks for c in (MINIMAX_M1, theirs)), strict=True):
        assert (ours.keep, ours.scale, ours.keeps_normed) == (other.keep, other.scale, other.keeps_normed)
        mine, its = ours.parts[0].layer, other.parts[0].layer
        if isinstance(mine, Lightning):
            assert mine.slopes == pytest.approx(its.slopes, rel=1e-5)
        else:
            assert mine == its


def test_decays_of_minimax_and_ring_slow_down_with_depth() -> None:
    """2^(−8/64) of the first head; 1 at MiniMax's layer 0 and at Ring's layer 1 (both but for 1e-5)."""
    minimax, ring = (
        [block.parts[0].layer for block in read_config(config, "bfloat16").blocks[::2]]
        for config in (MINIMAX_M1, RING_MINI)
    )
    assert minimax[0].slopes[0] == pytest.approx(2**-0.125 * (1 + 1e-5))
    assert minimax[78].slopes[63] == pytest.approx(2**-8 * (1 / 79 + 1e-5))
    assert ring[0].slopes[15] == pytest.approx(2**-8 * (1 + 1 / 19 + 1e-5))
    assert ring[1].slopes[0] == pytest.approx(2**-0.5 * (1 + 1e-5))
    assert [i for i, layer in enumerate(ring) if isinstance(layer, GroupedAttention)] == [4, 9, 14, 19]


def test_layers_that_make_no_whole_group_of_ring_are_full_attention() -> None:
    blocks = read_config(RING_MINI | {"num_hidden_layers": 22}, "bfloat16").blocks[::2]
    full = [i for i, block in enumerate(blocks) if isinstance(block.parts[0].layer, GroupedAttention)]
    assert full == [4, 9, 14, 19, 20, 21]


@pytest.mark.parametrize(
    ("config", "keys", "error"),
    [
        (MINIMAX_M1, {"attn_type_list": [0, 1]}, "'attn_type_list' is [0, 1], must be 0 or 1 for each layer"),
        (MINIMAX_M1, {"shared_intermediate_size": 512}, "'shared_intermediate_size' is 512, only 0 is supported"),
        (MINIMAX_M1, {"num_experts_per_tok": 33}, "33 experts a token of 32 experts"),
        (RING_MINI, {"group_norm_size": 3}, "'group_norm_size' is 3, must divide 2048"),
        (RING_MINI, {"topk_group": 9}, "8 experts a token of 9 groups of 8, in which 256 experts are"),
        (RING_MINI, {"score_function": None}, "'score_function' is None, only 'sigmoid' is supported"),
    ],
)
def test_lightning_sizes_that_do_not_match_are_refused_with_both_numbers(
    config: dict[str, Any], keys: dict[str, Any], error: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_config(config | keys, "bfloat16")
    assert error in str(refused.value)

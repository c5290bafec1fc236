"""Kimi-Linear and Ling 3.0: configurations as they are published, and sizes that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.cli.inspect import flops_table
from headwater.errors import CheckpointError
from headwater.layers.attention import Rotary
from headwater.layers.feed_forward import Experts
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES

FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "kda_layers": [i for i in range(1, 28) if i not in FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 157184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 6000000,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
    "use_mla_nope": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "layer_group_size": 6,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768,
    "first_k_dense_replace": 2,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 1,
}
CONFIGS = {"kimi-linear-48b-a3b": KIMI, "ling-3.0-flash": LING}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_is_its_profile(name: str) -> None:
    spec, profile = read_config(CONFIGS[name], "bfloat16"), PROFILES[name]
    assert spec.parameters_by_kind() == profile.parameters_by_kind()
    assert spec.kv_bytes_per_token == profile.kv_bytes_per_token
    assert spec.checkpoint_bytes == profile.checkpoint_bytes
    assert spec.flops == profile.flops


def test_layers_in_the_config_are_counted_from_one() -> None:
    spec = read_config(KIMI, "bfloat16")
    mixers = spec.layers[::2]
    assert [i + 1 for i, layer in enumerate(mixers) if isinstance(layer, LatentAttention)] == FULL
    assert isinstance(mixers[0], DeltaAttention)
    assert spec.max_length == 1048576
    (experts,) = {layer for layer in spec.layers if isinstance(layer, Experts)}
    assert (experts.scores, experts.corrected, experts.normalise, experts.scale) == ("sigmoid", True, True, 2.446)


def test_ling_rotates_neighbours_and_bounds_decays() -> None:
    spec = read_config(LING, "bfloat16")
    (latent,) = {layer for layer in spec.layers if isinstance(layer, LatentAttention)}
    assert (latent.rotary, latent.gated) == (Rotary(64, 6e6, neighbours=True), True)
    (delta,) = {layer for layer in spec.layers if isinstance(layer, DeltaAttention)}
    assert (delta.heads, delta.head_dim, delta.low_rank, delta.lowest) == (32, 128, False, -5.0)
    assert read_config(LING | {"kda_safe_gate": False}, "bfloat16").layers[0].lowest is None
    (experts,) = {layer for layer in spec.layers if isinstance(layer, Experts)}
    assert (experts.groups, experts.groups_per_token, experts.scale) == (8, 4, 2.5)


@pytest.mark.parametrize("config", [KIMI, LING], ids=["kimi", "ling"])
@pytest.mark.parametrize(
    "keys",
    [
        {"num_experts": 100, "num_expert_group": 8, "n_group": 8},
        {"num_expert_group": 4, "n_group": 4, "topk_group": 5},
        {"num_experts_per_token": 300, "num_experts_per_tok": 600},
    ],
    ids=["groups of unequal size", "more groups than there are", "more experts than there are"],
)
def test_experts_that_do_not_fit_together_are_refused(config: dict[str, Any], keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: \d+ experts a token of \d+ groups of \d+, in which"):
        read_config(config | keys, "bfloat16")


@pytest.mark.parametrize(
    ("inner", "error"),
    [
        ({"use_full_rank_gate": True}, "key 'use_full_rank_gate' is True, only False is supported"),
        ({"kda_layers": [0, 1, 2]}, r"key 'linear_attn_config' names layers \[0, 1, .*, there are 27"),
        ({"kda_layers": ["all"]}, r"key 'linear_attn_config' names layers .*'all'"),
        ({"num_heads": None}, "key 'num_heads' is missing"),
    ],
)
def test_an_object_of_delta_attention_that_is_wrong_is_refused(inner: dict[str, Any], error: str) -> None:
    own = KIMI["linear_attn_config"] | inner
    with pytest.raises(CheckpointError, match=error):
        read_config(KIMI | {"linear_attn_config": own}, "bfloat16")


def test_a_bound_of_decays_is_read() -> None:
    own = KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0}
    assert read_config(KIMI | {"linear_attn_config": own}, "bfloat16").layers[0].lowest == -5.0
    with pytest.raises(CheckpointError, match="key 'linear_attn_config' is 5, must be an object"):
        read_config(KIMI | {"linear_attn_config": 5}, "bfloat16")


def test_inspect_counts_latent_attention_as_attention() -> None:
    table = flops_table(read_config(KIMI, "bfloat16"))
    shares = [int(cell.rstrip("%")) for cell in table.columns[2].cells]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] > 0

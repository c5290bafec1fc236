"""Falcon-H1: what its multipliers become, and what its sizes are."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.mamba2 import Mamba2
from headwater.models.families import read_config

HALF_B = {
    "model_type": "falcon_h1",
    "vocab_size": 32_784,
    "hidden_size": 1024,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 2048,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "rope_theta": 1e11,
    "rope_scaling": None,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.04,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.94,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.37],
    "mlp_multipliers": [0.88, 0.59],
}


def test_smallest_model_has_its_published_size() -> None:
    assert sum(read_config(HALF_B, "bfloat16").parameters_by_kind().values()) == pytest.approx(0.521e9, rel=0.005)


def test_every_multiplier_has_its_place() -> None:
    spec = read_config(HALF_B, "bfloat16")
    assert (spec.embedding_scale, spec.logits_scale) == (5.5, 0.04)
    side_by_side, ffn = spec.blocks[:2]
    mamba, attention = side_by_side.parts
    assert isinstance(mamba.layer, Mamba2)
    assert isinstance(attention.layer, GroupedAttention)
    assert (mamba.in_scale, mamba.out_scale, mamba.layer.scales) == (1.25, 0.24, (0.35, 0.25, 0.36, 0.5, 0.37))
    assert (attention.in_scale, attention.out_scale, attention.layer.scale) == (1.1, 0.94, 0.4 / 8)
    assert ((mlp := ffn.parts[0]).layer.gate_scale, mlp.out_scale) == (0.88, 0.59)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"mamba_d_head": 32}, "24 Mamba heads of 32 channels are not 1536 channels"),
        ({"mamba_n_groups": 5}, "5 groups of 24 Mamba heads"),
        ({"ssm_multipliers": [1.0] * 4}, "must be 5 numbers"),
        ({"mlp_multipliers": [1.0, "x"]}, "must be 2 numbers"),
        ({"num_key_value_heads": 3}, "3 KV heads of 8 heads"),
    ],
)
def test_falcon_sizes_that_do_not_match_are_refused_with_both_numbers(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_config(HALF_B | keys, "bfloat16")
    assert error in str(refused.value)

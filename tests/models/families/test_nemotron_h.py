"""Nemotron-H's configurations say what their layers are in three ways."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.models.families import read_config
from headwater.spec import ModelSpec

KINDS = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
H_8B = {
    "model_type": "nemotron_h",
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "attention_head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 21_504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
}
NANO_30B = H_8B | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "head_dim": 128,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


def read(keys: dict[str, Any], **more: Any) -> ModelSpec:
    return read_config(keys | more, "bfloat16")


@pytest.mark.parametrize(("config", "billions"), [(H_8B, 8.1), (NANO_30B, 31.6)])
def test_models_have_their_published_sizes(config: dict[str, Any], billions: float) -> None:
    spec = read(config)
    assert sum(spec.parameters_by_kind().values()) == pytest.approx(billions * 1e9, rel=0.005)
    assert [layer.kind for layer in spec.layers] == [KINDS[sign] for sign in config["hybrid_override_pattern"]]


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_a_list_of_names_is_as_good_as_a_pattern(key: str, names: tuple[str, str]) -> None:
    mamba, attention = names
    listed = {key: [mamba, "mlp", attention, "moe"], "num_hidden_layers": 4, "hybrid_override_pattern": None}
    short = NANO_30B | {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*E"}
    assert read(NANO_30B | listed) == read(short)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"num_hidden_layers": 51}, "'hybrid_override_pattern' has 52 entries for 51 layers"),
        ({"hybrid_override_pattern": "M-X", "num_hidden_layers": 3}, "layer type 'X' is not one of"),
        ({"hybrid_override_pattern": None}, "key 'hybrid_override_pattern' is missing"),
        ({"hybrid_override_pattern": "", "num_hidden_layers": None}, "has 0 entries for 0 layers"),
        ({"n_groups": 3}, "3 groups of 64 Mamba heads"),
        ({"n_group": 5}, "6 experts a token from 1 of 5 groups of 128 experts"),
        ({"n_shared_experts": 2}, "key 'n_shared_experts' is 2, only 1"),
        ({"time_step_limit": [1.0, 0.5]}, "key 'time_step_limit' is [1.0, 0.5]"),
    ],
)
def test_nemotron_sizes_that_do_not_match_are_refused_with_both_numbers(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(NANO_30B, **keys)
    assert error in str(refused.value)

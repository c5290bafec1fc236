"""Readings of Jamba's and Mamba's config.json."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.mamba import Mamba
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES

JAMBA: dict[str, Any] = {  # the maths of Jamba-v0.1's
    "model_type": "jamba",
    "vocab_size": 65_536,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_inner_layernorms": True,
    "sliding_window": None,
    "mamba_dt_rank": 256,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": 50_280,
    "hidden_size": 760,
    "state_size": 16,
    "num_hidden_layers": 24,
}


def test_jambas_attention_and_experts_stand_where_its_periods_and_offsets_say() -> None:
    spec = read_config(JAMBA, "bfloat16")
    mixers, feed_forwards = spec.layers[::2], spec.layers[1::2]
    assert [i for i, layer in enumerate(mixers) if isinstance(layer, GroupedAttention)] == [4, 12, 20, 28]
    assert all(isinstance(layer, Mamba) for i, layer in enumerate(mixers) if i % 8 != 4)
    assert [type(layer) for layer in feed_forwards] == [Mlp, Experts] * 16
    assert spec.parameters_by_kind() == PROFILES["jamba-1.5-mini"].parameters_by_kind()


def test_one_expert_is_a_dense_mlp() -> None:
    spec = read_config(JAMBA | {"num_experts": 1}, "bfloat16")
    assert {type(layer) for layer in spec.layers[1::2]} == {Mlp}


@pytest.mark.parametrize("kind", ["attn", "expert"])
def test_an_offset_that_its_period_never_reaches_is_refused(kind: str) -> None:
    keys = {f"{kind}_layer_period": 3, f"{kind}_layer_offset": 3}
    with pytest.raises(CheckpointError, match=f"'{kind}_layer_offset' is 3, must be below '{kind}_layer_period', 3"):
        read_config(JAMBA | keys, "bfloat16")


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(CheckpointError, match="17 experts a token of 16 experts"):
        read_config(JAMBA | {"num_experts_per_tok": 17}, "bfloat16")


@pytest.mark.parametrize(("config", "key"), [(JAMBA, "mamba_dt_rank"), (MAMBA, "time_step_rank")])
def test_default_rank_is_a_sixteenth_of_the_width_rounded_up(config: dict[str, Any], key: str) -> None:
    for rank, taken in (("auto", -(-config["hidden_size"] // 16)), (48, 48)):
        assert rank_of(config | {key: rank}) == taken


def rank_of(config: dict[str, Any]) -> int:
    layer = read_config(config, "bfloat16").layers[0]
    assert isinstance(layer, Mamba)
    return layer.step_rank


def test_head_is_the_embedding_unless_the_config_unties_it() -> None:
    assert read_config(MAMBA, "float32").tied
    assert not read_config(MAMBA | {"tie_word_embeddings": False}, "float32").tied


def test_falcon_mamba_norms_steps_b_and_c_without_weights() -> None:
    falcon = read_config(MAMBA | {"model_type": "falcon_mamba"}, "float32").layers[0]
    assert isinstance(falcon, Mamba)
    assert falcon.normed
    assert not any("norm" in name for name in falcon.tensors())

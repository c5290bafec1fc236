"""Sizes and costs of models, against numbers that are known or counted another way."""

from dataclasses import replace
from typing import Any

import pytest

from headwater.errors import CheckpointError, ConfigError
from headwater.models.families import read_config

QWEN3_5_9B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "tie_word_embeddings": False,
}
NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def test_qwen3_5_9b_has_its_published_sizes() -> None:
    """policies.md: a checkpoint is 51,511,296 bytes and a token of KV 32,768, in bfloat16."""
    spec = read_config(QWEN3_5_9B, "bfloat16")
    assert spec.checkpoint_bytes == 51_511_296
    assert spec.kv_bytes_per_token == 32_768
    assert spec.page_bytes == 64 * 32_768
    assert spec.checkpoint_pages == 25
    assert spec.layers_by_kind == {"gated_delta_net": 24, "attention": 8, "mlp": 32}
    assert [spec.layers[i].kind for i in range(8)] == ["gated_delta_net", "mlp"] * 3 + ["attention", "mlp"]
    assert spec.attention_layers == tuple(range(6, 64, 8))
    assert 8.5e9 < sum(spec.parameters_by_kind().values()) < 9.5e9


def test_qwen3_next_80b_has_80_billion_parameters_and_3_that_work() -> None:
    spec = read_config(NEXT_80B, "bfloat16")
    assert spec.layers_by_kind["moe"] == 48
    assert 79e9 < sum(spec.parameters_by_kind().values()) < 81e9
    assert spec.weight_bytes == 2 * sum(spec.parameters_by_kind().values())
    assert 2.5e9 < spec.prefill_flops(0, 1) / 2 < 4.5e9


def test_flops_of_two_legs_add_up_to_those_of_one() -> None:
    for config in (QWEN3_5_9B, NEXT_80B):
        spec = read_config(config, "bfloat16")
        whole, first, second = (spec.flops_by_kind(a, b) for a, b in [(0, 5000), (0, 1728), (1728, 5000)])
        for kind in whole:
            assert whole[kind] == (first[kind] + second[kind] if kind != "head" else first[kind])


def test_attention_flops_count_each_visible_key() -> None:
    spec = read_config(QWEN3_5_9B, "bfloat16")
    layers, width = 8, 16 * 256
    one, other = (spec.flops_by_kind(n, n + 1)["attention"] for n in (100, 101))
    assert other - one == layers * 4 * width
    assert spec.flops_by_kind(0, 3)["attention"] - 3 * spec.flops_by_kind(0, 1)["attention"] == layers * 4 * width * 3


def test_layout_fills_the_memory_with_pages() -> None:
    spec = read_config(QWEN3_5_9B, "bfloat16", page_size=128)
    layout = spec.layout(10 * spec.page_bytes + 5)
    assert (layout.n_pages, layout.page_size, layout.unit_tokens, layout.unit_bytes) == (10, 128, 128, 512)
    assert (layout.checkpoint_pages, layout.slot_pages, layout.kv_pages_per_unit) == (13, 13, 1)
    assert (layout.resumable, layout.state_fraction) == ("checkpoints", None)
    with pytest.raises(ConfigError, match=r"1,000 bytes.*4,194,304"):
        spec.layout(1000)


def test_attention_only_and_mixer_only_models_need_no_special_case() -> None:
    spec = read_config(QWEN3_5_9B, "bfloat16")
    attention_only = replace(spec, blocks=tuple(b for b in spec.blocks if b.parts[0].layer.kind == "attention"))
    layout = attention_only.layout(10**9)
    assert (layout.checkpoint_pages, layout.resumable, layout.is_stateless) == (0, "every_page", True)
    mixer_only = replace(spec, blocks=tuple(b for b in spec.blocks if b.parts[0].layer.kind == "gated_delta_net"))
    assert (mixer_only.page_bytes, mixer_only.layout(10**9).kv_pages_per_unit) == (65536, 0)


@pytest.mark.parametrize("config", [QWEN3_5_9B, NEXT_80B])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_fewer_bits_change_no_page_and_no_checkpoint(config: dict[str, Any], dtype: str) -> None:
    stored = read_config(config, dtype)
    sizes = [stored.weight_bytes]
    kinds = stored.parameters_by_kind()
    for weights, bits in (("int8", 8.375), ("int4", 4.375)):  # embedding and head have 8 with both
        spec = read_config(config, dtype, weights=weights)
        assert (spec.page_bytes, spec.checkpoint_bytes) == (stored.page_bytes, stored.checkpoint_bytes)
        assert (spec.kv_bytes_per_token, spec.transition, spec.state) == (
            stored.kv_bytes_per_token, stored.transition, stored.state,
        )  # fmt: skip
        assert spec.layout(10**10) == stored.layout(10**10)
        assert spec.flops == stored.flops
        saved = sum(layer.quantised_weights for layer in spec.layers) * (stored.weight_element_bytes - bits / 8)
        saved += (kinds["embedding"] + kinds["head"]) * (stored.weight_element_bytes - 8.375 / 8)
        assert spec.weight_bytes == stored.weight_bytes - saved
        sizes.append(spec.weight_bytes)
    assert sizes == sorted(sizes, reverse=True)


def test_weights_are_held_in_the_shorter_of_two_dtypes() -> None:
    for stored, dtype, held, size in (
        ("bfloat16", "float32", "bfloat16", 2),
        ("float16", "bfloat16", "float16", 2),
        ("float32", "bfloat16", "bfloat16", 2),
        ("float32", "float32", "float32", 4),
    ):
        spec = read_config(NEXT_80B | {"dtype": stored}, dtype)
        assert (spec.weights_held, spec.element_bytes) == (held, 4 if dtype == "float32" else 2)
        assert spec.weight_bytes == size * sum(spec.parameters_by_kind().values())
    assert read_config(NEXT_80B, "float32").weights_held == "bfloat16"  # where config.json does not say


def test_only_products_embedding_and_head_are_quantised() -> None:
    """Count, of Qwen3-Next, all that is not a large product by hand."""
    spec = read_config(NEXT_80B, "bfloat16", weights="int4")
    hidden, vocab = 2048, 151936
    gdn = 2 * 32 * hidden + 8192 * 4 + 2 * 32 + 128  # b and a; convolution; A and dt; norm
    attention, moe = 2 * 256, (512 + 1) * hidden  # norms of queries and keys; router and the shared expert's gate
    kept = 97 * hidden + 36 * gdn + 12 * attention + 48 * moe
    tables = 2 * vocab * hidden
    quantised = sum(spec.parameters_by_kind().values()) - kept - tables
    assert spec.weight_bytes == 2 * kept + quantised * 4.375 / 8 + tables * 8.375 / 8


def test_unknown_weight_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="weights are 'int3', must be one of auto, int8, int4"):
        read_config(NEXT_80B, "bfloat16", weights="int3")


def test_states_are_aligned_and_do_not_overlap() -> None:
    spec = read_config(NEXT_80B, "float32")
    assert [part.name for part in spec.state.parts[:2]] == ["recurrent", "conv"]
    assert spec.state.part(2, "recurrent").shape == (32, 128, 128)
    assert spec.state.part(2, "conv").shape == (8192, 3)
    end = 0
    for part in spec.state.parts:
        assert part.offset % 64 == 0
        assert part.offset >= end
        end = part.offset + part.bytes
    assert end == spec.state.bytes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "'hidden_size' is missing"),
        ("hidden_size", "wide", "'hidden_size' is 'wide', must be int"),
        ("hidden_size", True, "'hidden_size' is True, must be int"),
        ("num_hidden_layers", 0, "'num_hidden_layers' is 0, must be from 1 to 2,147,483,647"),
        ("layer_types", ["full_attention"], "1 entries for 48 layers"),
        ("layer_types", ["mamba"] * 48, "'mamba'"),
        ("num_key_value_heads", 3, "'num_attention_heads' is 16, must be a multiple of 'num_key_value_heads'.* 3"),
        ("num_experts_per_tok", 513, "513 experts a token of 512"),
        ("hidden_act", "gelu", "'gelu', only 'silu'"),
        ("attention_bias", True, "'attention_bias' is True, only False"),
        ("partial_rotary_factor", 2.0, "512 of 256 channels"),
        ("rope_parameters", {"rope_type": "yarn"}, "'factor' is missing"),
    ],
)
def test_error_of_a_wrong_config_names_it(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(NEXT_80B | {key: value}, "bfloat16")


def test_a_page_is_a_multiple_of_64() -> None:
    with pytest.raises(CheckpointError, match="96"):
        read_config(NEXT_80B, "bfloat16", page_size=96)

"""Profiles: the papers' and the published numbers, and the engine's own sizes of the same shapes."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.layers.feed_forward import Experts
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES, Profile, load_profile
from headwater.models.profiles.marconi import FullAttention
from tests.support import examples

GIB = 2**30
MARCONI = PROFILES["marconi-7b"]
QWEN_9B = PROFILES["qwen3.5-9b"]


def test_marconi_7b_has_the_papers_bytes() -> None:
    """policies.md: 26,787,840 bytes a checkpoint, 65,536 of KV a token; 17.4 GB for 10K tokens in blocks of 16."""
    assert MARCONI.checkpoint_bytes == 26_787_840
    assert MARCONI.kv_bytes_per_token == 65_536
    assert MARCONI.layers_by_kind == {"attention": 4, "ssm": 24, "mlp": 28}


def test_marconi_7b_has_the_papers_flops() -> None:
    """Table 1 with L, D, N, and 10LD instead of 10L."""
    n, d, state = 1000, 4096, 128
    assert MARCONI.flops_by_kind(0, n) == {
        "head": 0,
        "attention": 4 * (8 * n * d**2 + 4 * n**2 * d),
        "ssm": 24 * (12 * n * d**2 + 16 * n * d * state + 10 * n * d),
        "mlp": 28 * 16 * n * d**2,
    }
    assert MARCONI.flops.between(0, n) == sum(MARCONI.flops_by_kind(0, n).values())


def test_qwen3_5_9b_gives_seglens_table() -> None:
    """20.39 GiB are 425 states, 22.61 GiB 740,752 tokens, and that is a state fraction of 0.474."""
    assert QWEN_9B.checkpoint_bytes == 51_511_296
    assert QWEN_9B.kv_bytes_per_token == 32_768
    states, kv = 425 * QWEN_9B.checkpoint_bytes, 740_752 * QWEN_9B.kv_bytes_per_token
    assert (round(states / GIB, 2), round(kv / GIB, 2)) == (20.39, 22.61)
    assert round(states / (states + kv), 3) == 0.474
    layout = QWEN_9B.layout(states + kv, page_size=1, state_fraction=0.474)
    state_pages = round(0.474 * layout.n_pages)
    assert state_pages // layout.checkpoint_pages in (424, 425)
    assert layout.n_pages - state_pages == pytest.approx(740_752, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("qwen3.5-9b", 27), ("granite-4.0-h-small", 40), ("nemotron-h-8b", 32), ("kimi-linear-48b-a3b", 42)],
)
def test_tail_of_63_tokens_has_bytes_of_its_parts(name: str, megabytes: int) -> None:
    """In bfloat16, with the page of KV; whole pages are at most one page more, and the rows of fewer tokens fewer."""
    profile = PROFILES[name]
    page_bytes = profile.bytes_of_page(64)
    assert round((profile.tail.bytes(63) + page_bytes) / 1e6) == megabytes
    assert sum(profile.tail.bytes_by_kind(63).values()) == profile.tail.bytes(63)
    assert 0 <= profile.tail_bytes(63, 64) - profile.tail.bytes(63) - page_bytes < page_bytes
    layout = profile.unified_layout(10**9, 64)
    assert (len(layout.tail_pages), layout.tail_pages[0]) == (65, 1)
    assert list(layout.tail_pages) == sorted(layout.tail_pages)
    assert (layout.tail_pages[63] + 1) * page_bytes == profile.tail_bytes(63, 64)


def test_layout_of_tokens_has_a_page_a_unit() -> None:
    layout = QWEN_9B.layout(10**9, page_size=64)
    assert layout.n_pages == 10**9 // (64 * 32_768)
    assert (layout.unit_tokens, layout.unit_bytes, layout.kv_pages_per_unit) == (64, 256, 1)
    assert (layout.checkpoint_pages, layout.slot_pages, layout.resumable) == (25, 25, "checkpoints")
    assert layout.flops == QWEN_9B.flops


def test_layout_of_a_recorded_trace_has_whole_pages_a_block() -> None:
    layout = QWEN_9B.layout(10**9, page_size=64, block_tokens=512)
    assert (layout.unit_tokens, layout.unit_bytes, layout.kv_pages_per_unit) == (512, 8, 1)
    with pytest.raises(ConfigError, match="512 tokens, no multiple of a page of 96"):
        QWEN_9B.layout(10**9, page_size=96, block_tokens=512)


def test_a_running_request_takes_as_many_states_as_it_is_given() -> None:
    assert QWEN_9B.layout(10**9, slots=3).slot_pages == 3 * 25


def test_elastic_pools_trade_two_mebibytes() -> None:
    assert QWEN_9B.layout(10**9, page_size=64, elastic=True).elastic_pages == 1
    assert QWEN_9B.layout(10**9, page_size=1, elastic=True).elastic_pages == 64
    assert QWEN_9B.layout(10**9).elastic_pages == 0


def test_a_memory_below_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory is 1,000 bytes, one page of this model is 65,536"):
        MARCONI.layout(1000, page_size=1)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_every_profile_names_its_source(profile: Profile) -> None:
    assert profile.source
    assert PROFILES[profile.name] is profile


def test_pure_attention_resumes_at_every_page_and_pure_recurrence_has_no_kv() -> None:
    attention = PROFILES["marconi-7b-attention"].layout(10**9, page_size=1)
    assert (attention.resumable, attention.checkpoint_pages, attention.slot_pages) == ("every_page", 0, 0)
    ssm = PROFILES["marconi-7b-ssm"].layout(10**9, page_size=1)
    assert (ssm.kv_pages_per_unit, ssm.n_pages, ssm.resumable) == (0, 10**9 // 65_536, "checkpoints")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of Qwen3.5 with random shapes, dense or with experts."""
    some = st.integers(1, 4)
    heads, v_heads = draw(some), draw(some)
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": draw(st.integers(10, 500)),
        "hidden_size": 32 * draw(some),
        "intermediate_size": draw(st.integers(1, 300)),
        "num_hidden_layers": draw(st.integers(1, 9)),
        "full_attention_interval": draw(some),
        "num_key_value_heads": heads,
        "num_attention_heads": heads * draw(some),
        "head_dim": 16 * draw(some),
        "linear_num_key_heads": v_heads,
        "linear_num_value_heads": v_heads * draw(some),
        "linear_key_head_dim": draw(st.integers(1, 40)),
        "linear_value_head_dim": draw(st.integers(1, 40)),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "tie_word_embeddings": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    if draw(st.booleans()):
        experts = draw(st.integers(1, 8))
        config |= {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
        config |= {"moe_intermediate_size": draw(st.integers(1, 64)), "shared_expert_intermediate_size": draw(some)}
    return config


@settings(max_examples=examples(60))
@given(configs(), st.integers(0, 5000), st.integers(0, 5000))
def test_profile_of_a_folder_has_the_costs_of_the_engine(config: dict[str, Any], start: int, more: int) -> None:
    spec = read_config(config, config["dtype"])
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        profile = load_profile(folder)
    assert profile.kv_bytes_per_token == spec.kv_bytes_per_token
    assert profile.checkpoint_bytes == spec.checkpoint_bytes
    assert profile.parameters_by_kind() == spec.parameters_by_kind()
    assert profile.weight_bytes == spec.weight_bytes
    assert profile.flops_by_kind(start, start + more) == spec.flops_by_kind(start, start + more)
    assert profile.flops == spec.flops
    assert profile.layout(10**9, 64) == spec.layout(10**9)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@settings(max_examples=examples(20))
@given(config=configs())
def test_a_folders_profile_holds_weights_as_the_engine_does(config: dict[str, Any], weights: str) -> None:
    spec = read_config(config, config["dtype"], weights=weights)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        profile, stored = (load_profile(folder, weights=held) for held in (weights, "auto"))
    assert profile.weight_bytes == spec.weight_bytes <= stored.weight_bytes
    assert profile.weight_bytes_read(3) == pytest.approx(spec.weight_bytes_read(3))
    assert profile.layout(10**9, 64) == stored.layout(10**9, 64)
    assert (profile.weights_held, profile.dtype_name) == (weights, config["dtype"])


def test_a_known_profile_s_weights_may_be_held_in_fewer_bits() -> None:
    name = "qwen3-next-80b-a3b"
    eight, four = (load_profile(name, weights=weights) for weights in ("int8", "int4"))
    assert PROFILES[name].weights_held == "bfloat16"
    assert load_profile(f"{name}-fp8").weights_held == "float8"
    assert eight.weight_bytes_read(1) / PROFILES[name].weight_bytes_read(1) == pytest.approx(8.375 / 16, rel=0.03)
    assert four.weight_bytes_read(1) / PROFILES[name].weight_bytes_read(1) == pytest.approx(4.375 / 16, rel=0.06)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 1.5, -0.5, float("nan")])
def test_neither_pool_is_without_pages(fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"state fraction is {fraction}, must be between 0 and 1"):
        MARCONI.layout(10**9, state_fraction=fraction)


def test_a_name_that_is_neither_profile_nor_folder_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'qwen9' is neither a folder with a config.json nor a profile of marconi-7b, "
    ):
        load_profile("qwen9")


PUBLISHED = {
    # billions of parameters, all and (where told) of those that one token uses without embedding and head
    "qwen3.5-9b": (9.0, None),
    "qwen3.5-35b-a3b": (35, None),
    "qwen3.5-122b-a10b": (122.11, None),
    "qwen3-next-80b-a3b": (80, None),
    "qwen3-8b": (8.2, 6.95),
    "ring-mini-linear-2.0": (16.4, 0.957),
    "ring-flash-linear-2.0": (104, 6.1),
    "minimax-m1": (456, 45.9),
    "kimi-linear-48b-a3b": (49.1, None),
    "jamba-1.5-mini": (51.6, None),
    "falcon-h1-7b": (7.59, None),
    "granite-4.0-h-small": (32.2, None),
    "bamba-9b": (9.78, None),
    "mamba2-2.7b": (2.7, None),
    "falcon-mamba-7b": (7.27, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_profile_has_as_many_parameters_as_were_published(name: str) -> None:
    profile, (total, used) = PROFILES[name], PUBLISHED[name]
    assert sum(profile.parameters_by_kind().values()) / 1e9 == pytest.approx(total, rel=0.01)
    if used is not None:
        assert profile.weight_bytes_read(1) / profile.element_bytes / 1e9 == pytest.approx(used, rel=0.015)


def test_nemotron_h_8b_has_every_parameter_of_its_checkpoint() -> None:
    assert sum(PROFILES["nemotron-h-8b"].parameters_by_kind().values()) == 8_100_852_736


def test_fp8_halves_the_layers_weights_and_nothing_that_is_cached() -> None:
    whole, half = PROFILES["qwen3-next-80b-a3b"], PROFILES["qwen3-next-80b-a3b-fp8"]
    assert half.weight_bytes_read(1) == whole.weight_bytes_read(1) / 2
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.01)
    assert half.layout(10**10) == whole.layout(10**10)


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose() -> None:
    """Compare with E(1 - (1 - k/E)^n) of E experts, k for each of n tokens: k for one token, all for very many."""
    experts = Experts(8, experts=16, per_token=2, intermediate=4)
    assert experts.hit(1) == pytest.approx(2)
    assert experts.hit(2) == pytest.approx(2 + 2 * (1 - 2 / 16))
    assert experts.hit(10_000) == 16
    assert experts.weights_read(10_000) == experts.weights


def test_parallel_devices_copy_caches_without_heads_to_split() -> None:
    grouped = replace(PROFILES["qwen3.5-35b-a3b"], tensor_parallel=4)  # 2 heads of KV
    assert grouped.kv_bytes_per_token == 2 * PROFILES["qwen3.5-35b-a3b"].kv_bytes_per_token
    assert replace(grouped, tensor_parallel=2).kv_bytes_per_token == PROFILES["qwen3.5-35b-a3b"].kv_bytes_per_token
    latent = replace(PROFILES["kimi-linear-48b-a3b"], tensor_parallel=4)
    assert latent.kv_bytes_per_token == 4 * PROFILES["kimi-linear-48b-a3b"].kv_bytes_per_token
    assert latent.checkpoint_bytes == PROFILES["kimi-linear-48b-a3b"].checkpoint_bytes
    with pytest.raises(ConfigError, match="16 heads with 2 of KV cannot be spread over 3 devices"):
        assert replace(grouped, tensor_parallel=3).kv_bytes_per_token


def test_latent_attention_keeps_one_row_a_token() -> None:
    """512 channels and 64 with position, in 7 layers of bfloat16; not 32 heads of keys and values."""
    assert PROFILES["kimi-linear-48b-a3b"].kv_bytes_per_token == 7 * 576 * 2


def test_transformer_needs_less_than_a_hybrid_with_a_state_per_block() -> None:
    """Marconi, section 3 and figure 3b: 10K tokens in blocks of 16 are 17.4 GB, 3.3 times a Transformer's."""
    hybrid = 10_000 * MARCONI.kv_bytes_per_token + 10_000 // 16 * MARCONI.checkpoint_bytes
    assert hybrid / 1e9 == pytest.approx(17.4, abs=0.05)
    transformer = 10_000 * 32 * FullAttention(4096).kv_elements(1) * 2  # 32 layers of the same width
    assert hybrid / transformer == pytest.approx(3.3, abs=0.05)


def test_a_draft_keeps_less_than_an_eighth_of_a_checkpoint() -> None:
    """docs/measurements/speculation.md has both sizes of each model. LFM2 keeps the inputs for both."""
    kept = {name: profile for name, profile in PROFILES.items() if profile.draft_bytes and "lfm2" not in name}
    assert len(kept) >= 10
    assert all(profile.checkpoint_bytes > 8 * profile.draft_bytes for profile in kept.values())

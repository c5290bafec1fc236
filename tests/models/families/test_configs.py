"""Readings of published configurations: layers, sizes and profiles, and sizes that do not fit together."""

import pytest

from headwater.cli.inspect import flops_table
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention, Rotary, WindowAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.layers.rotary_scaling import Yarn, mscale
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES
from headwater.spec import ModelSpec
from tests.models.families.configs import (
    FALCON_H1,
    GPT_OSS,
    GPT_OSS_120B,
    JAMBA,
    KIMI,
    KIMI_FULL,
    LFM2,
    LFM2_MOE,
    LING,
    MAMBA,
    MINIMAX_M1,
    NEMOTRON_H,
    NEMOTRON_NANO,
    RING_MINI,
    Config,
)

KINDS = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron-H's patterns


def read(config: Config, **changes: object) -> ModelSpec:
    return read_config(config | changes, "bfloat16")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (KIMI, "kimi-linear-48b-a3b"),
        (LING, "ling-3.0-flash"),
        (MINIMAX_M1, "minimax-m1"),
        (RING_MINI, "ring-mini-linear-2.0"),
        (LFM2, "lfm2-1.2b"),
        (LFM2_MOE, "lfm2-8b-a1b"),
        (GPT_OSS, "gpt-oss-20b"),
        (GPT_OSS_120B, "gpt-oss-120b"),
    ],
)
def test_published_model_has_the_costs_of_its_profile(config: Config, name: str) -> None:
    spec, profile = read(config), PROFILES[name]
    assert spec.kv_bytes_per_token == profile.kv_bytes_per_token
    assert spec.checkpoint_bytes == profile.checkpoint_bytes
    assert spec.flops == profile.flops
    assert spec.parameters_by_kind() == profile.parameters_by_kind()
    assert spec.layers_by_kind == profile.layers_by_kind


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (FALCON_H1, 0.521),
        (NEMOTRON_H, 8.1),
        (NEMOTRON_NANO, 31.6),
        (LFM2, 1.17),
        (LFM2_MOE, 8.34),
        (GPT_OSS, 20.9),
        (GPT_OSS_120B, 116.8),
    ],
)
def test_models_have_their_published_sizes(config: Config, billions: float) -> None:
    assert sum(read(config).parameters_by_kind().values()) == pytest.approx(billions * 1e9, rel=0.005)


SIZES_REFUSED = [
    (KIMI, {"num_experts": 100, "num_expert_group": 8}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (KIMI, {"num_expert_group": 4, "topk_group": 5}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (KIMI, {"num_experts_per_token": 300}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (LING, {"num_experts": 100, "n_group": 8}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (LING, {"n_group": 4, "topk_group": 5}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (LING, {"num_experts_per_tok": 600}, r"\d+ experts a token of \d+ groups of \d+, in which"),
    (LING, {"expert_swiglu_limit_list": [4] * 41}, "'expert_swiglu_limit_list' has 41 entries for 42 layers"),
    (LING, {"expert_swiglu_limit_list": [0, -4] * 21}, "'expert_swiglu_limit_list' is -4 for layer 1, must be 0 or"),
    (LING, {"share_expert_swiglu_limit_list": [True] * 42}, "'share_expert_swiglu_limit_list' is True for layer 0"),
    (KIMI, {"linear_attn_config": 5}, "key 'linear_attn_config' is 5, must be an object"),
    (MINIMAX_M1, {"attn_type_list": [0, 1]}, r"'attn_type_list' is \[0, 1\], must be 0 or 1 for each layer"),
    (MINIMAX_M1, {"shared_intermediate_size": 512}, "'shared_intermediate_size' is 512, only 0 is supported"),
    (MINIMAX_M1, {"num_experts_per_tok": 33}, "33 experts a token of 32 experts"),
    (RING_MINI, {"group_norm_size": 3}, "'group_norm_size' is 3, must divide 2048"),
    (RING_MINI, {"topk_group": 9}, "8 experts a token of 9 groups of 8, in which 256 experts are"),
    (RING_MINI, {"score_function": None}, "'score_function' is None, only 'sigmoid' is supported"),
    (
        JAMBA,
        {"attn_layer_period": 3, "attn_layer_offset": 3},
        "'attn_layer_offset' is 3, must be below 'attn_layer_period', 3",
    ),
    (
        JAMBA,
        {"expert_layer_period": 3, "expert_layer_offset": 3},
        "'expert_layer_offset' is 3, must be below 'expert_layer_period', 3",
    ),
    (JAMBA, {"num_experts_per_tok": 17}, "17 experts a token of 16 experts"),
    (FALCON_H1, {"mamba_d_head": 32}, "24 Mamba heads of 32 channels are not 1536 channels"),
    (FALCON_H1, {"mamba_n_groups": 5}, "5 groups of 24 Mamba heads"),
    (FALCON_H1, {"ssm_multipliers": [1.0] * 4}, "must be 5 numbers"),
    (FALCON_H1, {"mlp_multipliers": [1.0, "x"]}, "must be 2 numbers"),
    (FALCON_H1, {"num_key_value_heads": 3}, "3 KV heads of 8 heads"),
    (NEMOTRON_NANO, {"num_hidden_layers": 51}, "'hybrid_override_pattern' has 52 entries for 51 layers"),
    (NEMOTRON_NANO, {"hybrid_override_pattern": "M-X", "num_hidden_layers": 3}, "layer type 'X' is not one of"),
    (NEMOTRON_NANO, {"hybrid_override_pattern": None}, "key 'hybrid_override_pattern' is missing"),
    (NEMOTRON_NANO, {"hybrid_override_pattern": "", "num_hidden_layers": None}, "has 0 entries for 0 layers"),
    (NEMOTRON_NANO, {"n_groups": 3}, "3 groups of 64 Mamba heads"),
    (NEMOTRON_NANO, {"n_group": 5}, "6 experts a token from 1 of 5 groups of 128 experts"),
    (NEMOTRON_NANO, {"n_shared_experts": 2}, "key 'n_shared_experts' is 2, only 1"),
    (NEMOTRON_NANO, {"time_step_limit": [1.0, 0.5]}, r"key 'time_step_limit' is \[1.0, 0.5\]"),
]


@pytest.mark.parametrize(("config", "keys", "error"), SIZES_REFUSED)
def test_sizes_that_do_not_match_are_refused_with_both_numbers(config: Config, keys: Config, error: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{error}"):
        read(config, **keys)


# -- Kimi-Linear and Ling 3.0


def test_layers_in_the_config_are_counted_from_one() -> None:
    spec = read(KIMI)
    mixers = spec.layers[::2]
    assert [i + 1 for i, layer in enumerate(mixers) if isinstance(layer, LatentAttention)] == KIMI_FULL
    assert isinstance(mixers[0], DeltaAttention)
    assert spec.max_length == 1048576
    (experts,) = {layer for layer in spec.layers if isinstance(layer, Experts)}
    assert (experts.scores, experts.corrected, experts.normalise, experts.scale) == ("sigmoid", True, True, 2.446)


def test_ling_rotates_neighbours_and_bounds_decays() -> None:
    spec = read(LING)
    (latent,) = {layer for layer in spec.layers if isinstance(layer, LatentAttention)}
    assert (latent.rotary, latent.gated) == (Rotary(64, 6e6, neighbours=True), True)
    (delta,) = {layer for layer in spec.layers if isinstance(layer, DeltaAttention)}
    assert (delta.heads, delta.head_dim, delta.low_rank, delta.lowest) == (32, 128, False, -5.0)
    assert read(LING, kda_safe_gate=False).layers[0].lowest is None
    (experts,) = {layer for layer in spec.layers if isinstance(layer, Experts)}
    assert (experts.groups, experts.groups_per_token, experts.scale) == (8, 4, 2.5)


def test_limits_of_ling_are_read_for_each_layer_and_kind_of_expert() -> None:
    assert read(LING, expert_swiglu_limit_list=None).layers == read(LING).layers
    limits = {"expert_swiglu_limit_list": [4] * 42, "share_expert_swiglu_limit_list": [0] * 40 + [None, 7]}
    mlps = read(LING, **limits).layers[1::2]
    assert {mlp.limit for mlp in mlps[:2]} == {0.0}  # without experts
    assert [(mlp.limit, mlp.shared_limit) for mlp in mlps[2:]] == [(4.0, 0.0)] * 39 + [(4.0, 7.0)]


@pytest.mark.parametrize(
    ("inner", "error"),
    [
        ({"use_full_rank_gate": True}, "key 'use_full_rank_gate' is True, only False is supported"),
        ({"kda_layers": [0, 1, 2]}, r"key 'linear_attn_config' names layers \[0, 1, .*, there are 27"),
        ({"kda_layers": ["all"]}, r"key 'linear_attn_config' names layers .*'all'"),
        ({"num_heads": None}, "key 'num_heads' is missing"),
    ],
)
def test_an_object_of_delta_attention_that_is_wrong_is_refused(inner: Config, error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        read(KIMI, linear_attn_config=KIMI["linear_attn_config"] | inner)


def test_a_bound_of_decays_is_read() -> None:
    own = KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0}
    assert read(KIMI, linear_attn_config=own).layers[0].lowest == -5.0


def test_inspect_counts_latent_attention_as_attention() -> None:
    table = flops_table(read(KIMI))
    shares = [int(cell.rstrip("%")) for cell in table.columns[2].cells]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] > 0


# -- MiniMax and Ring-linear


def test_only_the_first_channels_of_minimax_rotate() -> None:
    attention = next(layer for layer in read(MINIMAX_M1).layers if isinstance(layer, GroupedAttention))
    assert attention.rotary == Rotary(64, 1e7)


def test_minimax_is_equal_by_own_keys_and_by_transformers_keys() -> None:
    """The decay of the last layer is all that differs: next to nothing by both, as full attention closes the model."""
    theirs = MINIMAX_M1 | {"model_type": "minimax"}
    codes = theirs.pop("attn_type_list")
    theirs["layer_types"] = [("linear_attention", "full_attention")[code] for code in codes]
    for block, factor in (("linear_attention", "linear_attn"), ("full_attention", "full_attn"), ("mlp", "mlp")):
        theirs[f"{factor}_alpha_factor"] = theirs.pop(f"layernorm_{block}_alpha")
        theirs[f"{factor}_beta_factor"] = theirs.pop(f"layernorm_{block}_beta")
    for ours, other in zip(read(MINIMAX_M1).blocks, read(theirs).blocks, strict=True):
        assert (ours.keep, ours.scale, ours.keeps_normed) == (other.keep, other.scale, other.keeps_normed)
        mine, its = ours.parts[0].layer, other.parts[0].layer
        if isinstance(mine, Lightning):
            assert mine.slopes == pytest.approx(its.slopes, rel=1e-5)
        else:
            assert mine == its


def mixers_of(config: Config, **changes: object) -> list[Lightning | GroupedAttention]:
    return [block.parts[0].layer for block in read(config, **changes).blocks[::2]]


def test_decays_of_minimax_and_ring_slow_down_with_depth() -> None:
    """2^(−8/64) of the first head; 1 at MiniMax's layer 0 and at Ring's layer 1 (both but for 1e-5)."""
    minimax, ring = mixers_of(MINIMAX_M1), mixers_of(RING_MINI)
    assert minimax[0].slopes[0] == pytest.approx(2**-0.125 * (1 + 1e-5))
    assert minimax[78].slopes[63] == pytest.approx(2**-8 * (1 / 79 + 1e-5))
    assert ring[0].slopes[15] == pytest.approx(2**-8 * (1 + 1 / 19 + 1e-5))
    assert ring[1].slopes[0] == pytest.approx(2**-0.5 * (1 + 1e-5))


@pytest.mark.parametrize(("layers", "full"), [(20, [4, 9, 14, 19]), (22, [4, 9, 14, 19, 20, 21])])
def test_layers_that_make_no_whole_group_of_ring_are_full_attention(layers: int, full: list[int]) -> None:
    mixers = mixers_of(RING_MINI, num_hidden_layers=layers)
    assert [i for i, layer in enumerate(mixers) if isinstance(layer, GroupedAttention)] == full


# -- Jamba and Mamba


def test_jambas_attention_and_experts_stand_where_its_periods_and_offsets_say() -> None:
    spec = read(JAMBA)
    mixers, feed_forwards = spec.layers[::2], spec.layers[1::2]
    assert [i for i, layer in enumerate(mixers) if isinstance(layer, GroupedAttention)] == [4, 12, 20, 28]
    assert all(isinstance(layer, Mamba) for i, layer in enumerate(mixers) if i % 8 != 4)
    assert [type(layer) for layer in feed_forwards] == [Mlp, Experts] * 16
    assert spec.parameters_by_kind() == PROFILES["jamba-1.5-mini"].parameters_by_kind()


def test_one_expert_is_a_dense_mlp() -> None:
    assert {type(layer) for layer in read(JAMBA, num_experts=1).layers[1::2]} == {Mlp}


@pytest.mark.parametrize(("config", "key"), [(JAMBA, "mamba_dt_rank"), (MAMBA, "time_step_rank")])
def test_default_rank_is_a_sixteenth_of_the_width_rounded_up(config: Config, key: str) -> None:
    for rank, used in (("auto", -(-config["hidden_size"] // 16)), (48, 48)):
        layer = read(config, **{key: rank}).layers[0]
        assert isinstance(layer, Mamba)
        assert layer.step_rank == used


def test_head_is_the_embedding_unless_the_config_unties_it() -> None:
    assert read(MAMBA).tied
    assert not read(MAMBA, tie_word_embeddings=False).tied


def test_falcon_mamba_norms_steps_b_and_c_without_weights() -> None:
    falcon = read(MAMBA, model_type="falcon_mamba").layers[0]
    assert isinstance(falcon, Mamba)
    assert falcon.normed
    assert not any("norm" in name for name in falcon.tensors())


# -- Falcon-H1 and Nemotron-H


def test_every_multiplier_has_its_place() -> None:
    spec = read(FALCON_H1)
    assert (spec.embedding_scale, spec.logits_scale) == (5.5, 0.04)
    side_by_side, ffn = spec.blocks[:2]
    mamba, attention = side_by_side.parts
    assert isinstance(mamba.layer, Mamba2)
    assert isinstance(attention.layer, GroupedAttention)
    assert (mamba.in_scale, mamba.out_scale, mamba.layer.scales) == (1.25, 0.24, (0.35, 0.25, 0.36, 0.5, 0.37))
    assert (attention.in_scale, attention.out_scale, attention.layer.scale) == (1.1, 0.94, 0.4 / 8)
    assert ((mlp := ffn.parts[0]).layer.gate_scale, mlp.out_scale) == (0.88, 0.59)


@pytest.mark.parametrize("config", [NEMOTRON_H, NEMOTRON_NANO])
def test_layers_of_nemotron_are_those_of_its_pattern(config: Config) -> None:
    assert [layer.kind for layer in read(config).layers] == [KINDS[sign] for sign in config["hybrid_override_pattern"]]


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_a_list_of_names_is_as_good_as_a_pattern(key: str, names: tuple[str, str]) -> None:
    mamba, attention = names
    listed = {key: [mamba, "mlp", attention, "moe"], "num_hidden_layers": 4, "hybrid_override_pattern": None}
    assert read(NEMOTRON_NANO, **listed) == read(NEMOTRON_NANO, num_hidden_layers=4, hybrid_override_pattern="M-*E")


def test_gpt_oss_scales_positions_from_4096_and_slides_in_every_second_layer() -> None:
    spec = read(GPT_OSS)
    window, full = spec.layers[0], spec.layers[2]
    assert isinstance(window, WindowAttention)
    assert (window.window, full.kind, spec.max_length) == (128, "attention", 131_072)
    yarn = Rotary(64, 150_000.0, scaling=Yarn(32.0, 4096, truncate=False), amplitude=mscale(32.0))
    assert isinstance(full, GroupedAttention)
    assert full.rotary == window.rotary == yarn
    bare = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "layer_types", "rope_theta")}
    assert read(bare).layers == spec.layers  # with transformers' defaults

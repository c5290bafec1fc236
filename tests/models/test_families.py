"""Promises of every family: it refuses each configuration that it does not support, and names its oracle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.models.families import (
    ALL_REFUSE,
    FAMILIES,
    MODEL_TYPES,
    Family,
    Refusal,
    family_of,
    read_config,
)
from headwater.models.load import load_model
from headwater.models.profiles import PROFILES
from tests.checkpoints import SMALLEST

REFUSALS = [
    pytest.param(family, refusal, id=f"{family.name}: {refusal.part}, {', '.join(refusal.keys)}")
    for family in FAMILIES
    for refusal in (*family.refuses, *ALL_REFUSE)
    if not refusal.keys.keys() & {*family.reads}
]

# Keys that change no logit: of training, of kernels, of the text's end (which `load` reads), of what wrote the file.
OF_NO_MATTER = {
    "architectures",
    "attention_dropout", "block_size", "bos_token_id", "chunk_size", "dtype", "eos_token_id",
    "hidden_dropout", "initializer_range", "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor",
    "linear_dt_max", "linear_dt_min", "mamba_chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
    "mtp_layers_block_type", "mtp_loss_scaling_factor", "num_logits_to_keep", "num_nextn_predict_layers",
    "output_router_logits", "pad_token_id", "pretraining_tp", "rescale_prenorm_residual", "router_aux_loss_coef",
    "router_jitter_noise", "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min",
    "time_step_scale", "torch_dtype", "transformers_version", "use_associative_scan", "use_cache", "use_mamba_kernels",
    "use_mambapy", "z_loss_coefficient",
}  # fmt: skip
WITH_EXPERTS = {"Qwen3.5, experts": "qwen3_5_moe", "Qwen3, experts": "qwen3_moe", "LFM2, experts": "lfm2_moe"}
OVERRULED = {  # by what else these small checkpoints' configs say
    "Qwen3-Next": {"intermediate_size"},  # all layers have experts
    "Qwen3, experts": {"intermediate_size", "sliding_window"},  # likewise, of both
    "Qwen3": {"max_window_layers", "sliding_window"},  # `use_sliding_window` is false
    "Granite 4": {"intermediate_size", "num_experts_per_tok", "rope_theta", "rope_type"},  # no experts, no positions
    "Mamba-2": {"time_step_rank"},  # Mamba-1's
    "Jamba": {"num_experts_per_tok"},  # one expert is an MLP
    "Mamba": {"expand"},  # `intermediate_size`
    "Kimi-Linear": {"head_dim", "qk_head_dim"},  # `qk_nope_head_dim` and `qk_rope_head_dim`
    "Ling 3.0": {
        "first_k_dense_replace", "head_dim", "layer_group_size", "qk_head_dim", "rope_theta", "short_conv_kernel_size",
    },  # lists of layers, `rope_parameters`, and the names above or of transformers
    "Ling 2.5": {"num_key_value_heads"},  # of latent attention, which has none
    "Falcon-H1": {"mamba_expand"},  # `mamba_d_ssm`
    "Nemotron-H": {"expand"},  # `mamba_num_heads` and `mamba_head_dim`
}  # fmt: skip


# Keys of published config.json files and of configuration classes in SGLang and vLLM that no recipe's file has.
OF_LING = {
    "multi_gate": False, "router_type": "topN", "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_enable_shared_expert": True, "norm_head": False, "use_qkv_bias": False, "use_bias": False,
}  # fmt: skip
OF_LIGHTNING = {"num_kv_heads_for_linear_attn": None, "linear_key_value_heads": None, "linear_rope": True}
PUBLISHED = {
    "Ring-linear": OF_LING | OF_LIGHTNING | {"linear_silu": False, "use_sliding_window": False},
    "Ling 2.5": OF_LING | OF_LIGHTNING | {"linear_silu": False, "use_linear_silu": False, "rope_interleave": True},
    "Ling 3.0": OF_LING | {"gated_attention_proj_granularity_type": "head_wise", "use_mla_nope": False},
    "Kimi-Linear": {
        "mla_use_output_gate": False, "topk_method": "noaux_tc", "routed_expert_hidden_size": None,
        "attn_res_block_size": None, "moe_router_activation_func": "sigmoid", "q_lora_rank": None,
    },
    "Nemotron-H": {"moe_latent_size": None, "sliding_window": None, "mlp_bias": False, "use_bias": False},
    "Granite 4": {"normalization_function": "rmsnorm", "attention_bias": False},
    "Falcon-H1": {"attn_layer_indices": None, "mamba_use_mlp": True, "projectors_bias": False},
    "Qwen3.5": {"attn_output_gate": True, "output_gate_type": "swish"},
    "Qwen3-Next": {"attn_output_gate": True, "output_gate_type": "swish"},
    "Bamba": {"attn_rotary_emb": None},
    "LFM2": {"block_use_swiglu": True, "conv_dim": None, "use_pos_enc": True},
}  # fmt: skip

# Classes of transformers 5.24, vLLM, SGLang and mlx-lm by the model types that their published config.json have.
SERVED = {
    "bailing_hybrid": ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM", "BailingMoeV2_5ForCausalLM"),
    "bailing_moe_linear": ("BailingMoeLinearV2ForCausalLM",),
    "bamba": ("BambaForCausalLM",),
    "falcon_h1": ("FalconH1ForCausalLM",),
    "falcon_mamba": ("FalconMambaForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "olmo_hybrid": ("OlmoHybridForCausalLM",),
    "lara_mini": ("LaraMiniForCausalLM",),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM",),
    "jamba": ("JambaForCausalLM",),
    "kimi_linear": ("KimiLinearForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2_moe": ("Lfm2MoeForCausalLM",),
    "mamba": ("MambaForCausalLM",),
    "mamba2": ("Mamba2ForCausalLM",),
    "minimax": ("MiniMaxForCausalLM",),
    "minimax_m1": ("MiniMaxM1ForCausalLM",),
    "minimax_text_01": ("MiniMaxText01ForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM",),
    "qwen3_5_text": ("Qwen3_5ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM",),
}
REFUSED = {
    "bailing_hybrid": ("BailingHybridModel",),
    "jamba": ("JambaForSequenceClassification",),
    "minimax": ("MiniMaxForSequenceClassification",),
    "nemotron_h": ("NemotronHPuzzleForCausalLM",),
    "qwen3": ("Qwen3ForSequenceClassification", "Qwen3Model", "JinaForRanking", "LlamaForCausalLMEagle3"),
    "qwen3_5": ("JevForDecision", "Qwen3_5ForTokenClassification"),
    "qwen3_moe": ("Qwen3MoeForSequenceClassification", "Qwen3MoeModel"),
    "qwen3_next": ("Qwen3NextForQuestionAnswering",),
}


def test_every_model_type_is_served_under_its_published_classes() -> None:
    assert SERVED.keys() == set(MODEL_TYPES)
    for model_type, named in SERVED.items():
        for name in named:
            assert name in family_of({"architectures": [name]}, model_type).architectures
        assert family_of({}, model_type) == family_of({"architectures": [named[0]]}, model_type)


def test_family_of_a_shared_model_type_is_chosen_by_class() -> None:
    assert family_of({"architectures": ["BailingMoeV3ForCausalLM"]}, "bailing_hybrid").name == "Ling 3.0"
    assert family_of({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "bailing_hybrid").name == "Ling 2.5"


@pytest.mark.parametrize(("model_type", "name"), [(key, name) for key, named in REFUSED.items() for name in named])
def test_other_class_of_a_model_type_is_refused_by_name(model_type: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}'.* of model_type '{model_type}' only "):
        family_of({"architectures": [name]}, model_type)


def changed(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The config with these keys, in its rotation's part too if they are of it."""
    rope = config.get("rope_parameters") or {}
    inner = {key: value for key, value in keys.items() if key in rope}
    return config | keys | ({"rope_parameters": rope | inner} if inner else {})


def test_every_family_has_a_checkpoint_to_be_tested_with() -> None:
    assert set(SMALLEST) == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_an_oracle_and_refusals(family: Family) -> None:
    assert family.oracle
    assert family.profile in PROFILES
    assert family.refuses


@pytest.mark.parametrize(("family", "refusal"), REFUSALS)
def test_unsupported_part_is_refused_by_name(
    family: Family, refusal: Refusal, checkpoint: Callable[[str], Path]
) -> None:
    config = json.loads((checkpoint(SMALLEST[family.name]) / "config.json").read_text())
    read_config(config, "float32")  # as it is, it is taken
    with pytest.raises(CheckpointError) as refused:
        read_config(changed(config, refusal.keys), "float32")
    assert refusal.error in str(refused.value)


def others(value: Any) -> list[Any]:
    """Values that a key might have instead of this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(1, value // 2)]
    if isinstance(value, float):
        return [2 * value + 0.5]
    if isinstance(value, list):
        return [value[:-1], []] if value else [[1]]
    return ["other"] if isinstance(value, str) else [True, 7, "other", 0.5, {"type": "other"}]


def matters(config: dict[str, Any], part: str | None, key: str) -> bool:
    """Whether any other value is refused, or read as another model."""
    as_it_is = read_config(config, "float32")
    for other in others(config[part][key] if part else config[key]):
        changed_to = {part: config[part] | {key: other}} if part else {key: other}
        try:
            if read_config(config | changed_to, "float32") != as_it_is:
                return True
        except CheckpointError:
            return True
    return False


@pytest.mark.parametrize("family", [*SMALLEST, *WITH_EXPERTS])
def test_every_key_is_read_or_refused_if_it_could_change_a_logit(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Recipes' files have each key of their class in transformers."""
    config = json.loads((checkpoint((SMALLEST | WITH_EXPERTS)[family]) / "config.json").read_text())
    parts = {key for key, value in config.items() if isinstance(value, dict)}
    keys = [(None, key) for key in config if key not in parts]
    keys += [(part, key) for part in parts for key in config[part]]
    unread = {key for part, key in keys if not matters(config, part, key)}
    assert unread - OF_NO_MATTER == OVERRULED.get(family, set())


@pytest.mark.parametrize(("family", "key"), [(name, key) for name, keys in PUBLISHED.items() for key in keys])
def test_published_key_is_read_or_refused_if_it_could_change_a_logit(
    family: str, key: str, checkpoint: Callable[[str], Path]
) -> None:
    config = json.loads((checkpoint(SMALLEST[family]) / "config.json").read_text())
    published = {key: PUBLISHED[family][key]} | config
    assert read_config(published, "float32") == read_config(config, "float32")
    assert matters(published, None, key)


@pytest.mark.parametrize("family", SMALLEST)
def test_no_weight_of_a_familys_checkpoint_is_left_unread(
    family: str, checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headwater.models")
    load_model(checkpoint(SMALLEST[family]))
    decays = ["model.layers (4)"] if family == "MiniMax" else []  # what it keeps of the fixed decays
    assert [record.getMessage().split("with: ")[1] for record in caplog.records] == decays

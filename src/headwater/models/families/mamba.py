"""Mamba and Falcon Mamba: Mamba-1 on its own, without attention and so without pages."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.mamba import Mamba
from headwater.models.families.family import Family, only
from headwater.models.families.reading import block, read_count
from headwater.spec import Architecture

MAX_LENGTH = 1 << 20  # a state has no positions: any length will do


def read_mamba(keys: ConfigKeys) -> Architecture:
    mixer = _read_mixer(keys)
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=mixer.hidden,
        blocks=tuple(block(i, "norm", mixer, "mixer") for i in range(read_count(keys))),
        max_length=keys.positive("max_position_embeddings", MAX_LENGTH),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        tied=keys.flag("tie_word_embeddings", True),
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
        float32_residual=keys.flag("residual_in_fp32", True),
    )


def _read_mixer(keys: ConfigKeys) -> Mamba:
    """Falcon Mamba's norms of the step, B and C have no weights; Mamba has none of them."""
    keys.require("hidden_act", "silu", default="silu")
    hidden = keys.positive("hidden_size")
    return Mamba(
        hidden,
        inner=keys.positive("intermediate_size", keys.positive("expand", 2) * hidden),
        state=keys.positive("state_size", 16),
        conv=keys.positive("conv_kernel", 4),
        step_rank=keys.automatic("time_step_rank", -(-hidden // 16)),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=keys.flag("use_bias", False),
        normed=keys.text("model_type") == "falcon_mamba",
        norm_eps=keys.number("mixer_rms_eps", 1e-6),
        norm_weights=False,
    )


MAMBA = Family(
    "Mamba",
    ("mamba", "falcon_mamba"),
    read_mamba,
    oracle="transformers",
    profile="falcon-mamba-7b",
    refuses=(only("other activations", "hidden_act", "gelu", "silu"),),
)

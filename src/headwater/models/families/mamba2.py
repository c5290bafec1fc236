"""Mamba-2 on its own: no attention, no MLP, and so no pages; work resumes at checkpoints."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.mamba2 import Mamba2
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.reading import block, read_count, read_step_limits
from headwater.spec import Architecture

EPS = 1e-5
MAX_LENGTH = 1 << 20  # a state has no positions: any length will do


def read_mamba2(keys: ConfigKeys) -> Architecture:
    mixer = _read_mixer(keys)
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=keys.positive("hidden_size"),
        blocks=tuple(block(i, "norm", mixer, "mixer") for i in range(read_count(keys))),
        max_length=keys.positive("max_position_embeddings", MAX_LENGTH),
        norm_eps=mixer.norm_eps,
        tied=keys.flag("tie_word_embeddings", False),
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
        float32_residual=keys.flag("residual_in_fp32", True),
    )


def _read_mixer(keys: ConfigKeys) -> Mamba2:
    keys.require("hidden_act", "silu", default="silu")
    heads, head_dim = keys.positive("num_heads"), keys.positive("head_dim")
    inner = keys.positive("expand", 2) * keys.positive("hidden_size")
    if heads * head_dim != inner:
        raise CheckpointError(f"config.json: {heads} heads of {head_dim} channels are not {inner} channels")
    groups = keys.positive("n_groups", 8)
    if heads % groups:
        raise CheckpointError(f"config.json: {groups} groups of {heads} heads, must divide them")
    bias = keys.flag("use_bias", False)
    return Mamba2(
        keys.positive("hidden_size"),
        heads,
        head_dim,
        state=keys.positive("state_size"),
        groups=groups,
        conv=keys.positive("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm_eps=keys.number("layer_norm_epsilon", EPS),
        step_limits=read_step_limits(keys),
    )


MAMBA2 = Family(
    "Mamba-2",
    ("mamba2",),
    read_mamba2,
    oracle="transformers",
    profile="mamba2-2.7b",
    refuses=(
        only("other activations", "hidden_act", "gelu", "silu"),
        Refusal("heads of other widths", {"head_dim": 48}, "heads of 48 channels are not "),
    ),
)

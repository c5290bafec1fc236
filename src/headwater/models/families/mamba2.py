"""Mamba-2 on its own: no attention, no MLP, and so no pages; work resumes at checkpoints."""

from __future__ import annotations

from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture
from headwater.layers.mamba2 import Mamba2
from headwater.models.families import reading
from headwater.models.families.family import OTHER_ACTIVATIONS, Family, Refusal
from headwater.models.families.mamba import read_pure


def read_mamba2(keys: ConfigKeys) -> Architecture:
    heads, head_dim = keys.positive("num_heads"), keys.positive("head_dim")
    inner = keys.positive("expand", 2) * keys.positive("hidden_size")
    if heads * head_dim != inner:
        raise CheckpointError(f"config.json: {heads} heads of {head_dim} channels are not {inner} channels")
    return read_pure(keys, read_mixer(keys, heads, head_dim, state=keys.positive("state_size")), tied=False)


def read_mixer(keys: ConfigKeys, heads: int, head_dim: int, state: int) -> Mamba2:
    """Read the Mamba-2 layer of this family and of Nemotron-H."""
    return mixer_of(
        keys,
        heads,
        head_dim,
        groups=keys.positive("n_groups", 8),
        bias=keys.flag("use_bias", False),
        state=state,
        conv=keys.positive("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
    )


def mixer_of(keys: ConfigKeys, heads: int, head_dim: int, groups: int, bias: bool, **fields: Any) -> Mamba2:
    """Return a layer with the limits of `time_step_limit`; `fields` are others of `Mamba2`."""
    if heads % groups:
        raise CheckpointError(f"config.json: {groups} groups of {heads} Mamba heads, must divide them")
    low, high = reading.numbers(keys, "time_step_limit", (0.0, float("inf")))
    if not 0 <= low < high:  # NaN, too
        raise CheckpointError(
            f"config.json: key 'time_step_limit' is {[low, high]}, must be 0 or more, and then more than that"
        )
    sizes = (keys.positive("hidden_size"), heads, head_dim)
    return Mamba2(*sizes, groups=groups, bias=bias, out_bias=bias, step_limits=(low, high), **fields)


FAMILY = Family(
    "Mamba-2",
    ("mamba2",),
    read_mamba2,
    architectures=("Mamba2ForCausalLM",),
    profile="mamba2-2.7b",
    refuses=(OTHER_ACTIVATIONS, Refusal("heads of other widths", {"head_dim": 48}, "heads of 48 channels are not ")),
)

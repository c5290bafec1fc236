"""Mamba and Falcon Mamba: Mamba-1 on its own, without attention and so without pages."""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture
from headwater.layers.layer import Layer
from headwater.layers.mamba import Mamba
from headwater.models.families import reading
from headwater.models.families.family import OTHER_ACTIVATIONS, Family

MAX_LENGTH = 1 << 20  # a state has no positions: any length will do


def read_mamba(keys: ConfigKeys) -> Architecture:
    """Falcon Mamba's norms of the step, B and C have no weights; Mamba has none of them."""
    hidden = keys.positive("hidden_size")
    mixer = Mamba(
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
    return read_pure(keys, mixer, tied=True)


def read_pure(keys: ConfigKeys, mixer: Layer, tied: bool) -> Architecture:
    """Return a model of one layer, repeated: Mamba's or Mamba-2's; `tied` is used if its key is missing."""
    return reading.architecture(
        keys,
        (reading.block(i, "norm", mixer, "mixer") for i in range(reading.count(keys))),
        MAX_LENGTH,
        keys.number("layer_norm_epsilon", 1e-5),
        tied=tied,
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
        float32_residual=keys.flag("residual_in_fp32", True),
    )


FAMILY = Family(
    "Mamba",
    ("mamba", "falcon_mamba"),
    read_mamba,
    architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
    profile="falcon-mamba-7b",
    refuses=(OTHER_ACTIVATIONS,),
)

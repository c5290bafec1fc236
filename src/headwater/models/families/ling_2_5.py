"""Ling 2.5 and 2.6, Ring 2.5: groups of Lightning attention, each closed by a layer of latent attention; experts.

Keys and formulas are those of the configuration and model code that inclusionAI publishes with Ring-2.5-1T
(github.com/inclusionAI/Ring-V2.5, modeling_bailing_moe_v2_5.py). Decays count layers from 1 there, as in Ring-linear,
and so they do in sglang-jax. vLLM, SGLang (lightning_backend.py) and mlx-lm 0.32 count from 0: their slopes are smaller
by an (n − 1)-th part of the first layer's.
"""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture
from headwater.layers.mla import LatentAttention
from headwater.models.families import reading
from headwater.models.families.bailing_hybrid import MIXER_NAMES as LATENT_NAMES
from headwater.models.families.family import DYNAMIC_ROTATION, OTHER_ACTIVATIONS, Family, only
from headwater.models.families.kimi_linear import read_latent
from headwater.models.families.ring import (
    FEWER_LINEAR_HEADS,
    LIMITED_EXPERTS,
    OTHER_ROUTERS,
    OTHER_SHARED_EXPERTS,
    in_groups,
    read_lightning,
)
from headwater.models.families.rotation import latent_scale, read_rotary, rotary_of

THETA = 600_000.0


def read_ling_2_5(keys: ConfigKeys) -> Architecture:
    lightning = read_lightning(keys, read_rotary(keys, reading.head_dim(keys), share=0.5, theta=THETA))
    return in_groups(keys, _read_latent(keys), LATENT_NAMES, lightning, keys.integer("first_k_dense_replace", 1))


def _read_latent(keys: ConfigKeys) -> LatentAttention:
    """All channels that are set apart for positions rotate, neighbours together; there are no heads of keys."""
    rotary = rotary_of(keys, keys.positive("qk_rope_head_dim"), THETA, neighbours=True)
    heads = keys.positive("num_attention_heads")
    latent = read_latent(keys.with_values({"num_key_value_heads": heads}), rotary=rotary)
    return replace(latent, scale=latent_scale(keys, latent.key_dim), bias=keys.flag("use_qkv_bias", False))


FAMILY = Family(
    "Ling 2.5",
    ("bailing_hybrid",),
    read_ling_2_5,
    architectures=("BailingMoeV2_5ForCausalLM",),
    profile="ling-2.6-flash",
    refuses=(
        OTHER_ACTIVATIONS,
        only("pairs of channels half a head apart", "rope_interleave", False, True),
        DYNAMIC_ROTATION,
        only("activated queries, keys and values", "linear_silu", True, False),
        only("activated queries, keys and values", "use_linear_silu", True, False),
        only("Lightning attention without positions", "linear_rope", False, True),
        *OTHER_ROUTERS,
        only("weights of experts that do not sum to one", "norm_topk_prob", False, True),
        OTHER_SHARED_EXPERTS,
        FEWER_LINEAR_HEADS,
        *LIMITED_EXPERTS,
    ),
    oracle="the same formulas token by token in plain torch, from the published configuration and model code",
)

"""Ling 3.0: groups of Kimi Delta Attention, each closed by a layer of latent attention with positions; experts.

Keys and names are those of the checkpoints that inclusionAI publishes, and of transformers where it writes others.
Limits of activations are as in vLLM and SGLang (`SwigluStepAndMul`); transformers and the published code have none.
"""

from __future__ import annotations

from dataclasses import replace

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.feed_forward import Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.families import reading
from headwater.models.families.family import DYNAMIC_ROTATION, FULL, LINEAR, OTHER_ACTIVATIONS, Family, only
from headwater.models.families.kimi_linear import FEWER_KV_HEADS, SPARSE, read_experts, read_feed_forwards, read_latent
from headwater.models.families.ring import EXPERT_NAMES, LIMIT_KEYS, OTHER_ROUTERS, OTHER_SHARED_EXPERTS, read_mtp
from headwater.models.families.rotation import latent_scale, rotary_of

MIXER_NAMES = {"o_proj": "dense"}
DELTA_NAMES = (("o_proj", "o_proj"), ("o_proj", "dense"))  # as published, and as transformers writes it
NORM_EPS = 1e-6


def read_ling(keys: ConfigKeys) -> Architecture:
    n_layers, group = reading.count(keys), keys.positive("layer_group_size", 6)
    types = reading.types(keys, (LINEAR, FULL), [LINEAR if (i + 1) % group else FULL for i in range(n_layers)])
    mixers = {LINEAR: _read_delta(keys), FULL: _read_latent(keys)}
    experts, mlp = read_experts(keys), Mlp(keys.positive("hidden_size"), keys.positive("intermediate_size"))
    keys.require("moe_shared_expert_intermediate_size", experts.intermediate, default=experts.intermediate)
    limits, shared_limits = (reading.limits(keys, key, n_layers) for key in LIMIT_KEYS)
    blocks = []
    for i, (kind, ffn) in enumerate(zip(types, read_feed_forwards(keys, n_layers), strict=True)):
        names = DELTA_NAMES if kind == LINEAR else tuple(MIXER_NAMES.items())
        mixer = Part(mixers[kind], f"layers.{i}.attention", names)
        blocks.append(Block(f"layers.{i}.input_layernorm.weight", (mixer,)))
        limited = replace(experts, limit=limits[i], shared_limit=shared_limits[i])
        of_ffn = (limited, EXPERT_NAMES) if ffn == SPARSE else (mlp, {})
        blocks.append(reading.block(i, "post_attention_layernorm", of_ffn[0], "mlp", **of_ffn[1]))
    mtp = read_mtp(n_layers, mixers[FULL], experts, MIXER_NAMES)
    length_key = reading.said(keys, "max_position_embeddings", "model_max_length")
    eps = keys.number("rms_norm_eps", NORM_EPS)
    return reading.architecture(keys, blocks, 32768, eps, length_key, embedding="word_embeddings.weight", mtp=mtp)


def _read_delta(keys: ConfigKeys) -> DeltaAttention:
    """One projection makes the decays, and one the output's gate; the logarithm of a decay has a bound."""
    return DeltaAttention(
        keys.positive("hidden_size"),
        keys.positive(reading.said(keys, "linear_num_heads", "num_attention_heads")),
        keys.positive(reading.said(keys, "linear_head_dim", "head_dim")),
        keys.positive(reading.said(keys, "linear_conv_kernel_dim", "short_conv_kernel_size"), 4),
        norm_eps=keys.number("rms_norm_eps", NORM_EPS),
        low_rank=False,
        lowest=keys.number("kda_lower_bound", -5.0) if keys.flag("kda_safe_gate", True) else None,
    )


def _read_latent(keys: ConfigKeys) -> LatentAttention:
    """All channels that are set apart for positions rotate, neighbours together; a gate for each head."""
    rotary = rotary_of(keys, keys.positive("qk_rope_head_dim"), neighbours=True)
    latent = read_latent(keys, rotary=rotary, gated=True)
    return replace(latent, scale=latent_scale(keys, latent.key_dim))


FAMILY = Family(
    "Ling 3.0",
    ("bailing_hybrid",),
    read_ling,
    architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
    profile="ling-3.0-flash",
    refuses=(
        OTHER_ACTIVATIONS,
        only("latent attention without positions", "use_mla_nope", True, False),
        only("pairs of channels half a head apart", "rope_interleave", False, True),
        DYNAMIC_ROTATION,
        only("gates of each channel", "gated_attention_proj_granularity_type", "element_wise", "head_wise"),
        only("decays by two projections", "no_kda_lora", False, True),
        only("biases of attention", "use_qkv_bias", True, False),
        only("biases of attention's output", "use_bias", True, False),
        *OTHER_ROUTERS,
        FEWER_KV_HEADS,
        OTHER_SHARED_EXPERTS,
    ),
    oracle="transformers; limits of experts in plain torch",
)

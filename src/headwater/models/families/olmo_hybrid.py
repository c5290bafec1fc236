"""OLMo-Hybrid: Gated DeltaNet with negative eigenvalues; attention without positions, with norms after each part.

Names are those of the published checkpoint. Files that transformers 5.24 saves call the norm after an attention
otherwise.
"""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.layer import Layer
from headwater.models.families import reading
from headwater.models.families.family import (
    DYNAMIC_ROTATION,
    FULL,
    LINEAR,
    OTHER_ACTIVATIONS,
    OTHER_LAYERS,
    Family,
)
from headwater.models.families.rotation import DESCRIPTIONS, read_rotary

NAMES = (
    *((f"in_proj_{ours}", f"{theirs}_proj") for ours, theirs in zip("qkvzba", "qkvgba", strict=True)),
    ("norm", "o_norm"),
    ("out_proj", "o_proj"),
)
NORM_EPS = 1e-5  # of the norm before the gate


HEADS = ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")  # as many as of queries by default


def read_olmo_hybrid(keys: ConfigKeys) -> Architecture:
    heads = keys.positive("num_attention_heads")
    keys = keys.with_values({name: keys.positive(name, heads) for name in HEADS})
    regular = [LINEAR if (i + 1) % 4 else FULL for i in range(reading.count(keys))]
    if FULL not in regular:
        regular[-1] = FULL
    attention, delta_net = _read_attention(keys), _read_delta_net(keys)
    mlp = Mlp(attention.hidden, keys.positive("intermediate_size", 11_008))
    blocks: list[Block] = []
    for i, kind in enumerate(reading.types(keys, (LINEAR, FULL), regular)):
        at = f"layers.{i}"
        if kind == LINEAR:
            blocks.append(Block(f"{at}.attention_layer_norm.weight", (Part(delta_net, f"{at}.linear_attn", NAMES),)))
            blocks.append(reading.block(i, "feedforward_layer_norm", mlp, "mlp"))
        else:
            blocks.append(
                _normed_after(at, "post_attention_layernorm", attention, "self_attn", "feedforward_layer_norm")
            )
            blocks.append(_normed_after(at, "post_feedforward_layernorm", mlp, "mlp"))
    return reading.architecture(keys, blocks, 65_536, keys.number("rms_norm_eps", 1e-6))


def _normed_after(at: str, norm: str, layer: Layer, name: str, otherwise: str = "") -> Block:
    other = otherwise and f"{at}.{otherwise}.weight"
    return Block(f"{at}.{norm}.weight", (Part(layer, f"{at}.{name}"),), norm_after=True, norm_otherwise=other)


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    head_dim, bias = reading.head_dim(keys), keys.flag("attention_bias", False)
    described = next((found for name in DESCRIPTIONS if (found := keys.optional(name))), None)
    rotates = isinstance(described, dict) and described.get("rope_theta") is not None
    return reading.attention(
        keys,
        head_dim,
        normed_whole=True,
        rotary=read_rotary(keys, head_dim) if rotates else None,
        bias=bias,
        out_bias=bias,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
    )


def _read_delta_net(keys: ConfigKeys) -> DeltaNet:
    keys.divides("linear_num_key_heads", "linear_num_value_heads")
    hidden, k_heads = keys.positive("hidden_size"), keys.positive("linear_num_key_heads")
    k_dim = keys.positive("linear_key_head_dim", 3 * hidden // (4 * k_heads))
    return DeltaNet(
        hidden,
        k_heads=k_heads,
        v_heads=keys.positive("linear_num_value_heads"),
        k_dim=k_dim,
        v_dim=keys.positive("linear_value_head_dim", 2 * k_dim),
        conv=keys.positive("linear_conv_kernel_dim", 4),
        norm_eps=NORM_EPS,
        apart=True,
        strength=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
    )


FAMILY = Family(
    "OLMo-Hybrid",
    ("olmo_hybrid",),
    read_olmo_hybrid,
    architectures=("OlmoHybridForCausalLM",),
    profile="olmo-hybrid-7b",
    refuses=(OTHER_ACTIVATIONS, DYNAMIC_ROTATION, OTHER_LAYERS),
)

"""Qwen's hybrids, three layers of Gated DeltaNet to one of gated attention (Qwen3.5, Qwen3-Next), and a Qwen3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.layer import Layer
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

VOCABULARY = 248_320  # of Qwen3.5
GROUP = 4  # layers, of which the last has attention


def _hybrid(
    name: str,
    source: str,
    feed_forward: Layer,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int = VOCABULARY,
    **fields: Any,
) -> Profile:
    """Return a hybrid with `heads` of queries and of KV with 256 channels, and of DeltaNet's values with 128."""
    hidden, n_attention, (n_heads, kv_heads, v_heads) = feed_forward.hidden, layers // GROUP, heads
    return Profile.of(
        name,
        source,
        vocabulary,
        (DeltaNet(hidden, k_heads=16, v_heads=v_heads, k_dim=128, v_dim=128, conv=4), layers - n_attention),
        (GroupedAttention(hidden, n_heads, kv_heads, 256, gated=True, normed=True), n_attention),
        (feed_forward, layers),
        **fields,
    )


def _experts(hidden: int, experts: int, per_token: int, intermediate: int) -> Experts:
    return Experts(hidden, experts, per_token, intermediate, shared=intermediate, shared_gate=True)


DEFAULTS = "transformers 5.23, defaults of {}".format
NEXT = _hybrid(
    "qwen3-next-80b-a3b",
    DEFAULTS("Qwen3NextConfig"),
    _experts(2048, 512, 10, 512),
    layers=48,
    heads=(16, 2, 32),
    vocabulary=151_936,
    note=FLOAT32_ASSUMED,
)
MODELS = (
    _hybrid(
        "qwen3.5-0.8b",
        "github.com/THUDM/slime, scripts/models/qwen3.5-0.8B.sh",
        Mlp(1024, 3584),
        layers=24,
        heads=(8, 2, 16),
        tied=True,
        note="DeltaNet's heads are those of huggingface.co/oopere/Qwen3.5-0.65B-Base-Rearchitected, made from it",
    ),
    _hybrid("qwen3.5-9b", DEFAULTS("Qwen3_5TextConfig"), Mlp(4096, 12288), layers=32, heads=(16, 4, 32)),
    _hybrid(
        "qwen3.5-35b-a3b", DEFAULTS("Qwen3_5MoeTextConfig"), _experts(2048, 256, 8, 512), layers=40, heads=(16, 2, 32)
    ),
    _hybrid(
        "qwen3.5-122b-a10b",
        "docs.vultr.com/models/alibaba-qwen-35/qwen3.5-122b-a10b",
        _experts(3072, 256, 8, 1024),
        layers=48,
        heads=(32, 2, 64),
        note="heads of KV and DeltaNet, and experts' widths, are not told there: these give its 122.11 B parameters",
    ),
    NEXT,
    replace(
        NEXT,
        name="qwen3-next-80b-a3b-fp8",
        weight_dtype="float8",
        note=f"all layers' weights count as 8 bits, though some small ones are bfloat16; {FLOAT32_ASSUMED}",
    ),
    Profile.of(
        "qwen3-8b",
        "huggingface.co/Qwen/Qwen3-8B, config.json",
        151_936,
        (GroupedAttention(4096, 32, 8, 128, normed=True), 36),
        (Mlp(4096, 12288), 36),
    ),
)

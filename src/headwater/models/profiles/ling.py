"""Ling 3.0: five layers of Kimi Delta Attention to one of latent attention."""

from __future__ import annotations

from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

HIDDEN = 2560

MODELS = (
    Profile(
        name="ling-3.0-flash",
        source="transformers 5.23, defaults of BailingHybridConfig (Ling-3.0-Flash)",
        hidden_size=HIDDEN,
        vocab_size=157_184,
        layers=(
            (DeltaAttention(HIDDEN, heads=32, head_dim=128, conv=4, low_rank=False, lowest=-5.0), 35),
            (LatentAttention(HIDDEN, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128, gated=True), 7),
            (Mlp(HIDDEN, 6144), 2),
            (
                Experts(
                    HIDDEN, 512, 8, 768, shared=768, scores="sigmoid", corrected=True, groups=8, groups_per_token=4
                ),
                40,
            ),
        ),
        note=FLOAT32_ASSUMED,
    ),
)

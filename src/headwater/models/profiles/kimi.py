"""Kimi Linear and Ling 3.0: three or five layers of Kimi Delta Attention to one of latent attention."""

from __future__ import annotations

from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

KIMI, LING = 2304, 2560  # widths

MODELS = (
    Profile(
        name="kimi-linear-48b-a3b",
        source="transformers 5.23, defaults of KimiLinearConfig (Kimi-Linear-48B-A3B-Instruct)",
        hidden_size=KIMI,
        vocab_size=163_840,
        layers=(
            (DeltaAttention(KIMI, heads=32, head_dim=128, conv=4), 20),
            (LatentAttention(KIMI, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128), 7),
            (Mlp(KIMI, 9216), 1),
            (Experts(KIMI, 256, 8, 1024, shared=1024, scores="sigmoid", corrected=True), 26),
        ),
        note=FLOAT32_ASSUMED,
    ),
    Profile(
        name="ling-3.0-flash",
        source="transformers 5.23, defaults of BailingHybridConfig (Ling-3.0-Flash)",
        hidden_size=LING,
        vocab_size=157_184,
        layers=(
            (DeltaAttention(LING, heads=32, head_dim=128, conv=4, low_rank=False, lowest=-5.0), 35),
            (LatentAttention(LING, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128, gated=True), 7),
            (Mlp(LING, 6144), 2),
            (
                Experts(LING, 512, 8, 768, shared=768, scores="sigmoid", corrected=True, groups=8, groups_per_token=4),
                40,
            ),
        ),
        note=FLOAT32_ASSUMED,
    ),
)

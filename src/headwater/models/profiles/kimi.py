"""Kimi Linear: three layers of Kimi Delta Attention to one of latent attention."""

from __future__ import annotations

from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.mla import LatentAttention
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

HIDDEN = 2304

MODELS = (
    Profile(
        name="kimi-linear-48b-a3b",
        source="transformers 5.23, defaults of KimiLinearConfig (Kimi-Linear-48B-A3B-Instruct)",
        hidden_size=HIDDEN,
        vocab_size=163_840,
        layers=(
            (DeltaAttention(HIDDEN, heads=32, head_dim=128, conv=4), 20),
            (LatentAttention(HIDDEN, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128), 7),
            (Mlp(HIDDEN, 9216), 1),
            (Experts(HIDDEN, 256, 8, 1024, shared=1024, scores="sigmoid", corrected=True), 26),
        ),
        note=FLOAT32_ASSUMED,
    ),
)

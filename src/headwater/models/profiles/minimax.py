"""MiniMax-M1 has the layers of MiniMax-Text-01: 456 billion parameters, 45.9 of them a token (arXiv 2506.13585)."""

from __future__ import annotations

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.lightning import Lightning
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

HIDDEN = 6144
MODELS = (
    Profile(
        name="minimax-m1",
        source="MiniMaxAI/MiniMax-M1-80k, config.json",
        hidden_size=HIDDEN,
        vocab_size=200_064,
        layers=(
            (Lightning(HIDDEN, 64, 128, normed=False), 70),
            (GroupedAttention(HIDDEN, 64, 8, 128), 10),
            (Experts(HIDDEN, 32, 2, 9216), 80),
        ),
        note=FLOAT32_ASSUMED,
    ),
)

"""Qwen's hybrids: three layers of Gated DeltaNet to one of gated attention (Qwen3.5, Qwen3-Next)."""

from __future__ import annotations

from headwater.models.profiles.attention import GroupedAttention
from headwater.models.profiles.feed_forward import Mlp
from headwater.models.profiles.profile import Profile
from headwater.models.profiles.recurrent import DeltaNet

MODELS = (
    Profile(
        name="qwen3.5-9b",
        source="huggingface.co/Qwen/Qwen3.5-9B, config.json",
        hidden_size=4096,
        vocab_size=248_320,
        layers=(
            (DeltaNet(4096, k_heads=16, v_heads=32, k_dim=128, v_dim=128, conv=4), 24),
            (GroupedAttention(4096, heads=16, kv_heads=4, head_dim=256, gated=True, normed=True), 8),
            (Mlp(4096, 12288), 32),
        ),
    ),
)

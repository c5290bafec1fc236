"""Hybrids of linear attention: Ring-linear 2.0 and MiniMax (Lightning), Kimi Linear and Ling 3.0 (KDA).

In each, layers of grouped or latent attention stand between groups of linear ones.
"""

from __future__ import annotations

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.kda import DeltaAttention
from headwater.layers.lightning import Lightning
from headwater.layers.mla import LatentAttention
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

RING = "{}; the hybrid of arXiv 2510.19338".format


def _ring(name: str, source: str, hidden: int, groups: int, group: int, heads: int, dense: int, routed: int) -> Profile:
    """Return a Ring-linear: groups of 5 and 8 layers give the report's 957 million and 6.1 billion parameters a token.

    The first layer's feed-forward is dense; all others have 256 experts, 8 of them a token, and a shared one.
    """
    layers = groups * group
    return Profile.of(
        name,
        source,
        157_184,
        (Lightning(hidden, heads, 128), layers - groups),
        (GroupedAttention(hidden, heads, 4, 128, normed=True), groups),
        (Mlp(hidden, dense), 1),
        (Experts(hidden, 256, 8, routed, shared=routed, scores="sigmoid", corrected=True), layers - 1),
        note=FLOAT32_ASSUMED,
    )


MINI = RING("Megatron-Bridge, BailingMoeV2Config of Ling-mini-2.0")
FLASH = RING("ollama.com/MedAIBase/Ring-flash-2.0, the GGUF file's metadata")
LING_EXPERTS = Experts(2560, 512, 8, 768, 768, scores="sigmoid", corrected=True, groups=8, groups_per_token=4)
MODELS = (
    _ring("ring-mini-linear-2.0", MINI, 2048, groups=4, group=5, heads=16, dense=5120, routed=512),
    _ring("ring-flash-linear-2.0", FLASH, 4096, groups=4, group=8, heads=32, dense=9216, routed=1024),
    Profile.of(  # layers of MiniMax-Text-01: 456 billion parameters, 45.9 of them a token (arXiv 2506.13585)
        "minimax-m1",
        "MiniMaxAI/MiniMax-M1-80k, config.json",
        200_064,
        (Lightning(6144, 64, 128, normed=False), 70),
        (GroupedAttention(6144, 64, 8, 128), 10),
        (Experts(6144, 32, 2, 9216), 80),
        note=FLOAT32_ASSUMED,
    ),
    Profile.of(
        "kimi-linear-48b-a3b",
        "transformers 5.23, defaults of KimiLinearConfig (Kimi-Linear-48B-A3B-Instruct)",
        163_840,
        (DeltaAttention(2304, heads=32, head_dim=128, conv=4), 20),
        (LatentAttention(2304, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128), 7),
        (Mlp(2304, 9216), 1),
        (Experts(2304, 256, 8, 1024, shared=1024, scores="sigmoid", corrected=True), 26),
        note=FLOAT32_ASSUMED,
    ),
    Profile.of(
        "ling-3.0-flash",
        "transformers 5.23, defaults of BailingHybridConfig (Ling-3.0-Flash)",
        157_184,
        (DeltaAttention(2560, heads=32, head_dim=128, conv=4, low_rank=False, lowest=-5.0), 35),
        (LatentAttention(2560, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128, gated=True), 7),
        (Mlp(2560, 6144), 2),
        (LING_EXPERTS, 40),
        note=FLOAT32_ASSUMED,
    ),
)

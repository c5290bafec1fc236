"""Ring-linear 2.0: groups of Lightning attention, each closed by one layer of grouped attention (arXiv 2510.19338).

Groups of 5 and 8 layers give the report's 957 million and 6.1 billion parameters that one token uses.
"""

from __future__ import annotations

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.lightning import Lightning
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

VOCABULARY = 157_184
SOURCE = "{}; the hybrid of arXiv 2510.19338".format


def _ring(name: str, source: str, hidden: int, groups: int, group: int, heads: int, dense: int, routed: int) -> Profile:
    """The first layer's feed-forward is dense; all others have 256 experts, 8 of them a token, and a shared one."""
    layers = groups * group
    return Profile(
        name=name,
        source=source,
        hidden_size=hidden,
        vocab_size=VOCABULARY,
        layers=(
            (Lightning(hidden, heads, 128), layers - groups),
            (GroupedAttention(hidden, heads, 4, 128, normed=True), groups),
            (Mlp(hidden, dense), 1),
            (Experts(hidden, 256, 8, routed, shared=routed, scores="sigmoid", corrected=True), layers - 1),
        ),
        note=FLOAT32_ASSUMED,
    )


LING = SOURCE("Megatron-Bridge, BailingMoeV2Config of Ling-mini-2.0")
FLASH = SOURCE("ollama.com/MedAIBase/Ring-flash-2.0, the GGUF file's metadata")
MODELS = (
    _ring("ring-mini-linear-2.0", LING, 2048, groups=4, group=5, heads=16, dense=5120, routed=512),
    _ring("ring-flash-linear-2.0", FLASH, 4096, groups=4, group=8, heads=32, dense=9216, routed=1024),
)

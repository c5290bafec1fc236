"""Families of checkpoints by the `model_type` of their text model's config.

A multimodal config may leave the text model's type out; then its own stands for it.
"""

from headwater.models.families.family import Family, delta_net_shapes
from headwater.models.families.qwen3_5 import QWEN3_5
from headwater.models.families.qwen3_next import QWEN3_NEXT

FAMILIES: dict[str, Family] = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
}

__all__ = ["FAMILIES", "Family", "delta_net_shapes"]

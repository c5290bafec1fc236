"""Qwen3.5, dense and with experts: as Qwen3-Next, with four input projections a Gated DeltaNet."""

from __future__ import annotations

from headwater.models.families.family import Family
from headwater.models.families.qwen3_next import REFUSES, read_qwen

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
FAMILY = Family(
    "Qwen3.5",
    MODEL_TYPES,
    lambda keys: read_qwen(keys, False),
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    profile="qwen3.5-9b",
    refuses=REFUSES,
)

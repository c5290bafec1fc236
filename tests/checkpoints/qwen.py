"""Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB

LINEAR_THEN_FULL = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Qwen:
    """The sizes of one checkpoint."""

    family: str  # "qwen3_5" | "qwen3_5_moe" | "qwen3_next"
    layer_types: tuple[str, ...] = LINEAR_THEN_FULL
    hidden_size: int = 64
    intermediate_size: int = 160
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 16
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 48
    shared_expert_intermediate_size: int = 80
    tied: bool = False
    dtype: str = "float32"
    shard_bytes: int | None = None
    seed: int = 0

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.model, self.tied, self.dtype, self.shard_bytes, self.seed)

    def model(self, end: int) -> torch.nn.Module:
        """transformers' model, random as it makes it."""
        import transformers

        own = {"family", "tied", "dtype", "shard_bytes", "seed"}
        values = {key: value for key, value in asdict(self).items() if key not in own}
        if self.family == "qwen3_5":
            values = {key: value for key, value in values.items() if "expert" not in key and "moe" not in key}
        if self.family == "qwen3_5_moe":
            del values["intermediate_size"]
        values |= {
            "vocab_size": VOCAB,
            "num_hidden_layers": len(self.layer_types),
            "layer_types": list(self.layer_types),
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": self.tied,
            "eos_token_id": end,
            "pad_token_id": end,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        }
        config_of = {
            "qwen3_5": transformers.Qwen3_5TextConfig,
            "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
            "qwen3_next": transformers.Qwen3NextConfig,
        }
        model_of = {
            "qwen3_5": transformers.Qwen3_5ForCausalLM,
            "qwen3_5_moe": transformers.Qwen3_5MoeForCausalLM,
            "qwen3_next": transformers.Qwen3NextForCausalLM,
        }
        return model_of[self.family](config_of[self.family](**values))


DENSE = Qwen("qwen3_5")
MOE = Qwen("qwen3_5_moe")
NEXT = Qwen("qwen3_next")
MODELS = {
    "qwen3_5": DENSE,
    "qwen3_5_moe": MOE,
    "qwen3_next": NEXT,
    "qwen3_5_tied": replace(DENSE, tied=True),
    "qwen3_5_odd_heads": replace(
        DENSE,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
    ),
    "qwen3_next_odd_heads": replace(
        NEXT, num_attention_heads=5, num_key_value_heads=1, linear_num_key_heads=3, linear_num_value_heads=9
    ),
    "qwen3_5_sharded": replace(DENSE, layer_types=LINEAR_THEN_FULL * 2, shard_bytes=300_000),
    "qwen3_5_moe_sharded": replace(MOE, layer_types=LINEAR_THEN_FULL * 2, shard_bytes=300_000),
    "qwen3_5_bfloat16": replace(DENSE, dtype="bfloat16"),
    "qwen3_5_wide": replace(
        DENSE,
        hidden_size=1024,
        intermediate_size=1536,
        num_attention_heads=8,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "qwen3_5_blocks": replace(  # inputs in blocks of 256, and heads that are shorter than a block
        DENSE,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "qwen3_5_bench": replace(
        DENSE,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 2,
        hidden_size=512,
        intermediate_size=1536,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}
RECIPES = {name: model.recipe for name, model in MODELS.items()}

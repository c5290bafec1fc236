"""Granite 4."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe, about_itself
from tests.checkpoints.tokenizer import VOCAB

DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
MODELS: dict[str, dict[str, Any]] = {
    "granite": DENSE,
    "granite_moe": {},
    "granite_rope": {"position_embedding_type": "rope", "tie_word_embeddings": True, **DENSE},
    "granite_moe_odd_heads": {
        "hidden_size": 120,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "mamba_n_heads": 15,
        "mamba_n_groups": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "granite_attention": {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", **DENSE},
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    layer_types = values.get("layer_types", ["linear_attention", "full_attention"])
    config = transformers.GraniteMoeHybridConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 48,
            "shared_intermediate_size": 80,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.25,
            "max_position_embeddings": 32768,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        | values
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


RECIPES = {
    name: Recipe(
        lambda end, values=values: model(values, end),
        values.get("tie_word_embeddings", False),
        fill={".D": about_itself},
    )
    for name, values in MODELS.items()
}

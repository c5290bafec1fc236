"""Bamba."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe, about_itself
from tests.checkpoints.tokenizer import VOCAB

MODELS: dict[str, dict[str, Any]] = {
    "bamba": {},
    "bamba_odd_heads": {
        "hidden_size": 120,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "mamba_n_heads": 15,
        "mamba_n_groups": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    config = transformers.BambaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "attn_layer_indices": [1],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "max_position_embeddings": 32768,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        | values
    )
    return transformers.BambaForCausalLM(config)


RECIPES = {
    name: Recipe(
        lambda end, values=values: model(values, end),
        values.get("tie_word_embeddings", False),
        fill={".D": about_itself},
    )
    for name, values in MODELS.items()
}

"""Mamba-2 on its own."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe, about_itself
from tests.checkpoints.tokenizer import VOCAB

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "mamba2_one_layer": {"num_hidden_layers": 1},
    "mamba2_odd_heads": {
        "hidden_size": 60,
        "num_heads": 5,
        "head_dim": 24,
        "n_groups": 1,
        "state_size": 24,
        "num_hidden_layers": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    config = transformers.Mamba2Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 16,
            "num_hidden_layers": 2,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        | values
    )
    return transformers.Mamba2ForCausalLM(config)


RECIPES = {
    name: Recipe(
        lambda end, values=values: model(values, end),
        values.get("tie_word_embeddings", False),
        fill={".D": about_itself},
    )
    for name, values in MODELS.items()
}

"""Falcon-H1."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB

MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.9,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.1,
    "ssm_multipliers": [1.3, 0.8, 1.2, 0.9, 0.7],
    "mlp_multipliers": [1.4, 0.6],
}
MODELS: dict[str, dict[str, Any]] = {
    "falcon_h1": {**MULTIPLIERS, "mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_n_groups": 1},
    "falcon_h1_biases": {
        **MULTIPLIERS,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "attention_bias": True,
        "mlp_bias": True,
        "projectors_bias": True,
        "mamba_proj_bias": True,
        "time_step_limit": (0.5, 1.5),
    },
    "falcon_h1_odd_heads": {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "tie_word_embeddings": True,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 120,
        "mamba_d_ssm": 240,
        "mamba_n_heads": 6,
        "mamba_n_groups": 3,
        "mamba_conv_bias": False,
        "mamba_d_state": 24,
        "num_hidden_layers": 3,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    config = transformers.FalconH1Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "max_position_embeddings": 32768,
            "mamba_chunk_size": 16,  # of the oracle, which takes ten times longer with larger ones
            "eos_token_id": end,
            "pad_token_id": end,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
        }
        | values
    )
    return transformers.FalconH1ForCausalLM(config)


RECIPES = {
    name: Recipe(lambda end, values=values: model(values, end), values.get("tie_word_embeddings", False))
    for name, values in MODELS.items()
}

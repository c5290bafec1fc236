"""Qwen3: full attention, windows, experts."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 100}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_window": {"layer_types": [SLIDING, FULL], **WINDOW},
    "qwen3_windows_only": {"layer_types": [SLIDING] * 2, "tie_word_embeddings": True, **WINDOW, "sliding_window": 192},
    "qwen3_window_odd_heads": {
        "layer_types": [FULL, SLIDING, SLIDING],
        "hidden_size": 72,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        **WINDOW,
        "sliding_window": 37,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3_moe_window": {
        "model_type": "qwen3_moe",
        "mlp_only_layers": [0],
        **EXPERTS,
        "norm_topk_prob": False,
        **WINDOW,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    values = dict(values)
    moe = values.pop("model_type", "qwen3") == "qwen3_moe"
    config_of = transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config
    model_of = transformers.Qwen3MoeForCausalLM if moe else transformers.Qwen3ForCausalLM
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": len(values.get("layer_types", [FULL] * 2)),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        "eos_token_id": end,
        "pad_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return model_of(config_of(**sizes | values))


RECIPES = {
    name: Recipe(lambda end, values=values: model(values, end), values.get("tie_word_embeddings", False))
    for name, values in MODELS.items()
}

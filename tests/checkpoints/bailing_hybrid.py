"""Ling 3.0."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.kimi_linear import KDA, MLA
from tests.checkpoints.recipe import Recipe, about_itself, correct
from tests.checkpoints.tokenizer import VOCAB

MODELS: dict[str, dict[str, Any]] = {
    "ling": {"layer_types": [KDA, MLA]},
    "ling_odd_heads": {  # transformers reads a delta layer's width back as that of positions: here they are equal
        "layer_types": [KDA, MLA, KDA],
        "hidden_size": 72,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "qk_rope_head_dim": 24,
        "qk_nope_head_dim": 8,
        "v_head_dim": 40,
        "kda_safe_gate": False,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    layer_types = values["layer_types"]
    config = transformers.BailingHybridConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "moe_intermediate_size": 48,
            "num_hidden_layers": len(layer_types),
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 32768,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        | values
    )
    return correct(transformers.BailingHybridForCausalLM(config))


RECIPES = {
    name: Recipe(lambda end, values=values: model(values, end), fill={"layernorm.weight": about_itself})
    for name, values in MODELS.items()
}

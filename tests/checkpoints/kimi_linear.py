"""Kimi-Linear."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe, about_itself, correct
from tests.checkpoints.tokenizer import VOCAB

KDA, MLA = "linear_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "kimi_linear": {"layer_types": [KDA, MLA]},
    "kimi_linear_groups": {
        "layer_types": [KDA, KDA, MLA, KDA],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "q_lora_rank": 24,
        "attention_bias": True,
        "norm_topk_prob": False,
    },
    "kimi_linear_odd_heads": {
        "layer_types": [KDA, MLA, KDA],
        "hidden_size": 72,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "linear_num_heads": 3,
        "linear_head_dim": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "v_head_dim": 40,
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    layer_types = values["layer_types"]
    config = transformers.KimiLinearConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "moe_intermediate_size": 48,
            "num_hidden_layers": len(layer_types),
            "mlp_layer_types": ["dense"] + ["sparse"] * (len(layer_types) - 1),
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "eos_token_id": end,
            "pad_token_id": end,
            "bos_token_id": None,
        }
        | values
    )
    return correct(transformers.KimiLinearForCausalLM(config))


RECIPES = {
    name: Recipe(lambda end, values=values: model(values, end), fill={"layernorm.weight": about_itself})
    for name, values in MODELS.items()
}

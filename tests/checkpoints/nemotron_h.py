"""Nemotron-H, with MLPs and with experts."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB

MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"hybrid_override_pattern": "M-*E"},
    "nemotron_h_latent": {
        "hybrid_override_pattern": "M*-MEM",
        "moe_latent_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "mlp_bias": True,
        "use_bias": True,
    },
    "nemotron_h_odd_heads": {
        "hybrid_override_pattern": "M-M*-",
        "hidden_size": 72,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_num_heads": 5,
        "mamba_head_dim": 24,
        "n_groups": 1,
        "ssm_state_size": 40,
        "use_conv_bias": False,
        "time_step_limit": (0.5, float("inf")),
        "time_step_min": 0.5,  # what transformers takes for the limit
    },
}


def model(values: dict[str, Any], end: int) -> torch.nn.Module:
    import transformers

    config = transformers.NemotronHConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 32768,
            "chunk_size": 16,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        | values
    )
    made = transformers.NemotronHForCausalLM(config)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).roll(3))  # enough to choose others than without it
    return made


RECIPES = {name: Recipe(lambda end, values=values: model(values, end)) for name, values in MODELS.items()}

"""Hybrids with linear attention: MiniMax, Kimi-Linear and Ling 3.0. Ring-linear is in `ring.py`.

N tokens, C model width, I intermediate width, J experts a token.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.checkpoints.recipe import END, Family, about_itself, correct, oracle

# fmt: off
LINEAR, FULL = "linear_attention", "full_attention"
MINIMAX = Family("MiniMaxConfig", "MiniMaxForCausalLM", {
    "layer_types": [LINEAR, FULL], "hidden_size": 64,
    "intermediate_size": 48,  # of an expert
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 1.0,
    "full_attn_alpha_factor": 1.25, "full_attn_beta_factor": 0.75, "mlp_alpha_factor": 1.5, "mlp_beta_factor": 1.0,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "bos_token_id": END,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
})
LATENTS = {
    "layer_types": [LINEAR, FULL], "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
}
KIMI = Family(
    "KimiLinearConfig",
    "KimiLinearForCausalLM",
    LATENTS
    | {
        "mlp_layer_types": ["dense", "sparse"], "qk_rope_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 16,
        "bos_token_id": None,
    },
    {"layernorm.weight": about_itself},
    correct,
)
LING = Family(
    "BailingHybridConfig",
    "BailingHybridForCausalLM",
    LATENTS | {"first_k_dense_replace": 1, "head_dim": 16, "qk_rope_head_dim": 16, "n_group": 4, "topk_group": 2},
    {"layernorm.weight": about_itself},
    correct,
)
RECIPES = {
    "minimax": MINIMAX.recipe(),
    "minimax_tied_sharded": MINIMAX.recipe(
        tie_word_embeddings=True, layer_types=[FULL, LINEAR, LINEAR], shard_bytes=300_000
    ),
    "minimax_odd_heads": MINIMAX.recipe(
        layer_types=[LINEAR, LINEAR, FULL, LINEAR], hidden_size=72, num_attention_heads=3, num_key_value_heads=1,
        head_dim=40, num_local_experts=5, num_experts_per_tok=3,
    ),
    "kimi_linear": KIMI.recipe(),
    "kimi_linear_groups": KIMI.recipe(
        layer_types=[LINEAR, LINEAR, FULL, LINEAR], mlp_layer_types=["dense", "sparse", "sparse", "dense"], n_group=4,
        topk_group=2, n_shared_experts=2, q_lora_rank=24, attention_bias=True, norm_topk_prob=False,
    ),
    "kimi_linear_equal_heads": KIMI.recipe(  # as many heads in both kinds of attention, as in GGUF files
        layer_types=[LINEAR, FULL, LINEAR], mlp_layer_types=["dense", "sparse", "sparse"], linear_num_heads=4,
        n_shared_experts=2,
    ),
    "kimi_linear_odd_heads": KIMI.recipe(
        layer_types=[LINEAR, FULL, LINEAR], mlp_layer_types=["dense", "sparse", "sparse"], hidden_size=72,
        num_attention_heads=5, num_key_value_heads=5, linear_num_heads=3, linear_head_dim=24, kv_lora_rank=40,
        qk_nope_head_dim=24, v_head_dim=40,
    ),
    "ling": LING.recipe(),
    "ling_limits": LING.recipe(  # the first layer has no experts
        expert_swiglu_limit_list=[0.3, 0.5], share_expert_swiglu_limit_list=[None, 0.25],
    ),
    "ling_yarn": LING.recipe(
        rope_parameters={
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 1e4,
            "mscale": 0.7, "mscale_all_dim": 1.3,
        },
    ),
    "ling_odd_heads": LING.recipe(  # transformers reads a delta layer's width back as that of positions: they are equal
        layer_types=[LINEAR, FULL, LINEAR], hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=24,
        qk_rope_head_dim=24, qk_nope_head_dim=8, v_head_dim=40, kda_safe_gate=False, n_group=1, topk_group=1,
        attention_bias=True,
    ),
}
# fmt: on


def ling_oracle(folder: Path) -> nn.Module:
    """The checkpoint as transformers loads it, with limits of its experts' activations, which transformers lacks."""
    model = oracle(folder)
    limits, shared_limits = (
        getattr(model.config, key, [0] * len(model.model.layers))
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    )
    for layer, limit, shared_limit in zip(model.model.layers, limits, shared_limits, strict=True):
        if hasattr(layer.mlp, "experts"):
            if limit:
                layer.mlp.experts = LimitedExperts(layer.mlp.experts, limit)
            if shared_limit:
                layer.mlp.shared_experts = LimitedMlp(layer.mlp.shared_experts, shared_limit)
    return model


def limited(gate_NI: torch.Tensor, up_NI: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.minimum(nn.functional.silu(gate_NI), torch.tensor(limit)) * up_NI.clip(-limit, limit)


class LimitedMlp(nn.Module):
    def __init__(self, plain: nn.Module, limit: float) -> None:
        super().__init__()
        self.plain, self.limit = plain, limit

    def forward(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.plain.down_proj(limited(self.plain.gate_proj(x_NC), self.plain.up_proj(x_NC), self.limit))


class LimitedExperts(nn.Module):
    """Routed experts, one token and expert after the other."""

    def __init__(self, plain: nn.Module, limit: float) -> None:
        super().__init__()
        self.plain, self.limit = plain, limit

    def forward(self, x_NC: torch.Tensor, expert_NJ: torch.Tensor, weight_NJ: torch.Tensor) -> torch.Tensor:
        rows = zip(x_NC, expert_NJ.tolist(), weight_NJ.tolist(), strict=True)
        return torch.stack([self.routed(x_C, experts, weights) for x_C, experts, weights in rows])

    def routed(self, x_C: torch.Tensor, experts: Sequence[int], weights: Sequence[float]) -> torch.Tensor:
        out_C = torch.zeros_like(x_C)
        for expert, weight in zip(experts, weights, strict=True):
            gate_I, up_I = (self.plain.gate_up_proj[expert] @ x_C).chunk(2)
            out_C += weight * (self.plain.down_proj[expert] @ limited(gate_I, up_I, self.limit))
        return out_C

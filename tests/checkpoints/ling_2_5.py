"""Ling 2.5, which transformers does not have: Ring-linear's model with latent attention, in plain float64.

T tokens, S tokens so far, H heads, K their width, J pairs of channels.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from tests.checkpoints.ring import Memory, Norm, Ring, oracle

LATENT_EPS = 1e-6  # of the latents' norms, whatever `rms_norm_eps` is


@dataclass(frozen=True)
class Ling(Ring):
    """The keys of a config.json that differ between checkpoints, as they are published."""

    kv_lora_rank: int = 32
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16

    def config(self, end: int) -> dict[str, object]:
        own = {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "rope_interleave": True}
        return super().config(end) | own

    def full_attention(self) -> nn.Module:
        return LatentAttention(self)


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent row, and a key part with positions that heads share."""

    def __init__(self, c: Ling) -> None:
        super().__init__()
        self.c, heads, key_dim = c, c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(c.hidden_size, heads * key_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=c.use_qkv_bias)
            self.q_a_layernorm = Norm(c.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(c.q_lora_rank, heads * key_dim, bias=False)
        row = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, row, bias=c.use_qkv_bias)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.dense = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=c.use_qkv_bias)

    def forward(self, x_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        c, n = self.c, len(x_TD)
        q_TX = self.q_proj(x_TD) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        plain_THK, turned_THK = q_TX.view(n, c.num_attention_heads, -1).split(
            [c.qk_nope_head_dim, c.qk_rope_head_dim], 2
        )
        latent_TL, shared_TK = self.kv_a_proj_with_mqa(x_TD).split([c.kv_lora_rank, c.qk_rope_head_dim], 1)
        kv_THX = self.kv_b_proj(self.kv_a_layernorm(latent_TL)).view(n, c.num_attention_heads, -1)
        k_THK, v_THV = kv_THX.split([c.qk_nope_head_dim, c.v_head_dim], 2)
        shared_THK = self.turned(shared_TK[:, None], memory.length).expand(-1, c.num_attention_heads, -1)
        memory.keys.append(torch.cat((k_THK, shared_THK), 2))
        memory.values.append(v_THV)
        q_THK, k_SHK = torch.cat((plain_THK, self.turned(turned_THK, memory.length)), 2), torch.cat(memory.keys)
        score_HTS = torch.einsum("thk,shk->hts", q_THK, k_SHK) / math.sqrt(q_THK.shape[2])
        later_TS = torch.ones(score_HTS.shape[1:]).triu(len(k_SHK) - n + 1).bool()
        weight_HTS = score_HTS.masked_fill(later_TS, float("-inf")).softmax(-1)
        return self.dense(torch.einsum("hts,shv->thv", weight_HTS, torch.cat(memory.values)).flatten(1))

    def turned(self, x_THK: torch.Tensor, start: int) -> torch.Tensor:
        """Turn each pair of neighbouring channels, as a complex number."""
        pairs = x_THK.shape[2] // 2
        position_T1 = torch.arange(start, start + len(x_THK), dtype=x_THK.dtype)[:, None]
        angle_TJ = position_T1 * self.c.rope_theta ** (-torch.arange(pairs, dtype=x_THK.dtype) / pairs)
        turn_T1J = torch.polar(torch.ones_like(angle_TJ), angle_TJ)[:, None]
        return torch.view_as_real(
            torch.view_as_complex(x_THK.unflatten(2, (pairs, 2)).contiguous()) * turn_T1J
        ).flatten(2)


SMALL = Ling()
MODELS = {
    "ling_2_5": SMALL,
    "ling_2_5_biases": replace(
        SMALL, num_hidden_layers=4, layer_group_size=3, use_qkv_bias=True, use_bias=True, use_qk_norm=False,
        q_lora_rank=24, num_shared_experts=2,
    ),
    "ling_2_5_odd_heads": replace(
        SMALL, num_hidden_layers=3, layer_group_size=3, hidden_size=72, num_attention_heads=3, head_dim=24,
        group_norm_size=3, qk_nope_head_dim=8, qk_rope_head_dim=24, v_head_dim=40, partial_rotary_factor=1.0,
        first_k_dense_replace=0, num_experts=9, num_experts_per_tok=3, n_group=3, tie_word_embeddings=True,
    ),
}  # fmt: skip
RECIPES = {name: model.recipe for name, model in MODELS.items()}
ling_oracle = partial(oracle, kind=Ling)

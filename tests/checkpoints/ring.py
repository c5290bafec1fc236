"""Ring-linear 2.0, which transformers does not have: its checkpoints, and a model of our own in plain float64.

The recurrence runs token by token, each token's experts one after the other. T tokens, D model width, H heads, K their
width, G groups.
"""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import silu

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB


@dataclass(frozen=True)
class Ring:
    """The keys of a config.json that differ between checkpoints, as they are published."""

    num_hidden_layers: int = 2
    layer_group_size: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    group_norm_size: int = 2
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10_000.0
    use_qk_norm: bool = True
    use_qkv_bias: bool = False
    use_bias: bool = False
    linear_silu: bool = False
    first_k_dense_replace: int = 1
    num_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 48
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def full_attention(self) -> nn.Module:
        return FullAttention(self)

    @property
    def recipe(self) -> Recipe:
        return Recipe(lambda end: RingModel(self, end), self.tie_word_embeddings)

    def config(self, end: int) -> dict[str, object]:
        return asdict(self) | {
            "architectures": ["BailingMoeLinearV2ForCausalLM"],
            "model_type": "bailing_moe_linear",
            "vocab_size": VOCAB,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "rope_scaling": None,
            "eos_token_id": end,
            "pad_token_id": end,
        }


@dataclass
class Memory:
    """State of one layer after the tokens so far."""

    length: int = 0
    state: torch.Tensor | None = None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Norm(nn.Module):
    """Norm of each of `groups` equal parts of a row."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return (parts / (parts.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2) * self.weight


class Attention(nn.Module):
    """The projections that both kinds of layers have, and queries and keys in their places."""

    def __init__(self, c: Ring, kv_heads: int) -> None:
        super().__init__()
        self.c, self.kv_heads = c, kv_heads
        rows = (c.num_attention_heads + 2 * kv_heads) * c.head_dim
        self.query_key_value = nn.Linear(c.hidden_size, rows, bias=c.use_qkv_bias)
        self.dense = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.use_bias)
        if c.use_qk_norm:
            self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
            self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)

    def heads(self, x_TC: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [T, heads, K] each."""
        counts = [self.c.num_attention_heads, self.kv_heads, self.kv_heads]
        q_THK, k_THK, v_THK = x_TC.unflatten(1, (-1, self.c.head_dim)).split(counts, 1)
        if self.c.use_qk_norm:
            q_THK, k_THK = self.query_layernorm(q_THK), self.key_layernorm(k_THK)
        return self._rotated(q_THK, start), self._rotated(k_THK, start), v_THK

    def _rotated(self, x_THK: torch.Tensor, start: int) -> torch.Tensor:
        half = int(self.c.head_dim * self.c.partial_rotary_factor) // 2
        position_T11 = torch.arange(start, start + len(x_THK), dtype=x_THK.dtype)[:, None, None]
        angle_T1F = position_T11 * self.c.rope_theta ** (-torch.arange(half, dtype=x_THK.dtype) / half)
        a, b, rest = x_THK[..., :half], x_THK[..., half : 2 * half], x_THK[..., 2 * half :]
        cos, sin = angle_T1F.cos(), angle_T1F.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class FullAttention(Attention):
    def __init__(self, c: Ring) -> None:
        super().__init__(c, c.num_key_value_heads)

    def forward(self, x_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        q_THK, k_TGK, v_TGK = self.heads(self.query_key_value(x_TD), memory.length)
        memory.keys.append(k_TGK)
        memory.values.append(v_TGK)
        shared = self.c.num_attention_heads // self.kv_heads
        k_SHK, v_SHK = (torch.cat(kept).repeat_interleave(shared, 1) for kept in (memory.keys, memory.values))
        score_HTS = torch.einsum("thk,shk->hts", q_THK, k_SHK) / math.sqrt(self.c.head_dim)
        later_TS = torch.ones(score_HTS.shape[1:]).triu(len(k_SHK) - len(x_TD) + 1).bool()
        weight_HTS = score_HTS.masked_fill(later_TS, float("-inf")).softmax(-1)
        return self.dense(torch.einsum("hts,shk->thk", weight_HTS, v_SHK).flatten(1))


class LinearAttention(Attention):
    def __init__(self, c: Ring, layer: int) -> None:
        super().__init__(c, c.num_attention_heads)
        width = c.num_attention_heads * c.head_dim
        self.g_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.g_norm = Norm(width, c.rms_norm_eps, c.group_norm_size)
        depth = 1 - (layer - 1) / (c.num_hidden_layers - 1) + 1e-5
        self.decays = [math.exp(-depth * slope) for slope in slopes(c.num_attention_heads)]

    def forward(self, x_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        mixed_TC = self.query_key_value(x_TD)
        q_THK, k_THK, v_THK = self.heads(silu(mixed_TC) if self.c.linear_silu else mixed_TC, memory.length)
        decay_H11 = torch.tensor(self.decays, dtype=x_TD.dtype)[:, None, None]
        if memory.state is None:
            memory.state = x_TD.new_zeros(self.c.num_attention_heads, self.c.head_dim, self.c.head_dim)
        read_THK = []
        for q_HK, k_HK, v_HK in zip(q_THK * self.c.head_dim**-0.5, k_THK, v_THK, strict=True):
            memory.state = decay_H11 * memory.state + k_HK[:, :, None] * v_HK[:, None, :]
            read_THK.append((q_HK[:, :, None] * memory.state).sum(1))
        return self.dense(self.g_norm(torch.stack(read_THK).flatten(1)) * torch.sigmoid(self.g_proj(x_TD)))


def slopes(heads: int) -> list[float]:
    """ALiBi's, in which head counts between powers of two borrow from the next one."""
    power = 1 << (heads.bit_length() - 1)
    lent = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return [2 ** (-8 * (i + 1) / power) for i in range(power)] + lent


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Gate(nn.Linear):
    def __init__(self, c: Ring) -> None:
        super().__init__(c.hidden_size, c.num_experts, bias=False)
        self.c = c
        self.expert_bias = nn.Parameter(torch.zeros(c.num_experts))

    def choose(self, x_D: torch.Tensor) -> dict[int, torch.Tensor]:
        """Weights of one token's experts."""
        score_E = torch.sigmoid(self(x_D))
        rank_GX = (score_E + self.expert_bias).view(self.c.n_group, -1)
        of_group = rank_GX.sort(-1).values[:, -2:].sum(-1).tolist()
        best = sorted(range(self.c.n_group), key=lambda g: -of_group[g])[: self.c.topk_group]
        size = rank_GX.shape[1]
        known = [g * size + x for g in best for x in range(size)]
        chosen = sorted(known, key=lambda e: -float(rank_GX.flatten()[e]))[: self.c.num_experts_per_tok]
        total = sum(score_E[e] for e in chosen)
        return {e: self.c.routed_scaling_factor * score_E[e] / total for e in chosen}


class Routed(nn.Module):
    def __init__(self, c: Ring) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = nn.ModuleList(Mlp(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))
        if c.num_shared_experts:
            self.shared_experts = Mlp(c.hidden_size, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        rows = [sum(w * self.experts[e](x_D) for e, w in self.gate.choose(x_D).items()) for x_D in x_TD]
        shared_TD = self.shared_experts(x_TD) if hasattr(self, "shared_experts") else 0
        return torch.stack(rows) + shared_TD


class Layer(nn.Module):
    def __init__(self, c: Ring, i: int) -> None:
        super().__init__()
        whole_groups = c.num_hidden_layers // c.layer_group_size * c.layer_group_size
        full = (i + 1) % c.layer_group_size == 0 or i >= whole_groups
        self.attention = c.full_attention() if full else LinearAttention(c, i)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size) if i < c.first_k_dense_replace else Routed(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        x_TD = x_TD + self.attention(self.input_layernorm(x_TD), memory)
        memory.length += len(x_TD)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Trunk(nn.Module):
    def __init__(self, c: Ring) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor  # [1, T, V]


class RingModel(nn.Module):
    """With as much of transformers' interface as the tests use."""

    def __init__(self, c: Ring, end: int) -> None:
        from transformers import GenerationConfig

        super().__init__()
        self.config, self.generation_config = c.config(end), GenerationConfig()
        self.model = Trunk(c)
        self.lm_head = nn.Linear(c.hidden_size, VOCAB, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def hidden(self, token_1T: torch.Tensor, memories: list[Memory] | None = None) -> torch.Tensor:
        """Hidden states [T, D], after the final norm."""
        memories = memories or [Memory() for _ in self.model.layers]
        x_TD = self.model.word_embeddings(token_1T[0])
        for layer, memory in zip(self.model.layers, memories, strict=True):
            x_TD = layer(x_TD, memory)
        return self.model.norm(x_TD)

    def forward(self, token_1T: torch.Tensor, memories: list[Memory] | None = None) -> Output:
        return Output(self.lm_head(self.hidden(token_1T, memories))[None])

    @torch.no_grad()
    def generate(self, token_1T: torch.Tensor, max_new_tokens: int, do_sample: bool) -> torch.Tensor:
        """The most likely tokens."""
        assert not do_sample
        memories = [Memory() for _ in self.model.layers]
        new_1T, all_1T = token_1T, token_1T
        for _ in range(max_new_tokens):
            new_1T = self(new_1T, memories).logits[:, -1:].argmax(-1)
            all_1T = torch.cat((all_1T, new_1T), 1)
        return all_1T

    def save_pretrained(self, folder: Path, max_shard_size: str | int) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
        dtype = str(self.lm_head.weight.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(self.config | {"torch_dtype": dtype}))
        self.generation_config.save_pretrained(folder)


def oracle(folder: Path, kind: type[Ring] = Ring) -> RingModel:
    """The checkpoint in float64."""
    config = json.loads((folder / "config.json").read_text())
    own = {key: config[key] for key in asdict(kind())}
    model = RingModel(kind(**own), config["eos_token_id"])
    head = f"model.layers.{own['num_hidden_layers']}."  # of multi-token prediction, which this model has not
    tensors = load_file(folder / "model.safetensors")
    own_tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}
    model.load_state_dict(own_tensors, strict=not own["tie_word_embeddings"])
    return model.double().eval()


SMALL = Ring()
MODELS = {
    "ring": SMALL,
    "ring_biases": replace(
        SMALL, num_hidden_layers=4, layer_group_size=3, use_qkv_bias=True, use_bias=True, use_qk_norm=False,
        linear_silu=True, num_shared_experts=2,
    ),
    "ring_odd_heads_tied": replace(
        SMALL, num_hidden_layers=3, layer_group_size=3, hidden_size=72, num_attention_heads=6, num_key_value_heads=2,
        head_dim=24, group_norm_size=3, partial_rotary_factor=1.0, first_k_dense_replace=0, num_experts=9,
        num_experts_per_tok=3, n_group=3, num_shared_experts=0, tie_word_embeddings=True,
    ),
}  # fmt: skip
RECIPES = {name: model.recipe for name, model in MODELS.items()}

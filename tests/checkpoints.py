"""Random Hugging Face checkpoints, written with transformers: what the model code is held to.

Their weights make caching visible: states decay slowly, so what came long before changes the logits, and only words
that encode back to themselves are ever likely, so greedy text does not end early.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from headwater.models.tiny import tokenizer as tiny_tokenizer
from headwater.models.tiny.checkpoint import SEED, VOCAB

MEMORY_TOKENS = (20.0, 5000.0)
WORD_LOGITS = 5.0  # standard deviation over the likely words
LINEAR_THEN_FULL = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Recipe:
    """The sizes of one checkpoint; the vocabulary and the tokenizer are the embedded default's."""

    family: str  # "qwen3_5" | "qwen3_5_moe" | "qwen3_next"
    layer_types: tuple[str, ...] = LINEAR_THEN_FULL
    hidden_size: int = 64
    intermediate_size: int = 160
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 16
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 48
    shared_expert_intermediate_size: int = 80
    tied: bool = False
    dtype: str = "float32"
    shard_bytes: int | None = None
    seed: int = 0


DENSE = Recipe("qwen3_5")
MOE = Recipe("qwen3_5_moe")
NEXT = Recipe("qwen3_next")
RECIPES = {
    "qwen3_5": DENSE,
    "qwen3_5_moe": MOE,
    "qwen3_next": NEXT,
    "qwen3_5_tied": replace(DENSE, tied=True),
    "qwen3_5_odd_heads": replace(
        DENSE,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
    ),
    "qwen3_next_odd_heads": replace(
        NEXT, num_attention_heads=5, num_key_value_heads=1, linear_num_key_heads=3, linear_num_value_heads=9
    ),
    "qwen3_5_sharded": replace(DENSE, layer_types=LINEAR_THEN_FULL * 2, shard_bytes=300_000),
    "qwen3_5_moe_sharded": replace(MOE, layer_types=LINEAR_THEN_FULL * 2, shard_bytes=300_000),
    "qwen3_5_bfloat16": replace(DENSE, dtype="bfloat16"),
    "qwen3_5_wide": replace(
        DENSE,
        hidden_size=1024,
        intermediate_size=1536,
        num_attention_heads=8,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "qwen3_5_bench": replace(
        DENSE,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 2,
        hidden_size=512,
        intermediate_size=1536,
        head_dim=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
}


def checkpoint(root: Path, name: str) -> Path:
    """The folder of a recipe's checkpoint below `root`, written if it is not there."""
    folder = root / name
    if not (folder / "config.json").exists():
        write(folder, RECIPES[name])
    return folder


def write(folder: Path, recipe: Recipe) -> None:
    """Write the checkpoint as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer.train(VOCAB, SEED)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer.config()))
    end = tokenizer.token_to_id(tiny_tokenizer.TURN_END)
    model = _model(recipe, end)
    _fill(model, recipe, tiny_tokenizer.sayable(tokenizer))
    model.generation_config.update(do_sample=False, eos_token_id=end, pad_token_id=end)
    model = model.to(getattr(torch, recipe.dtype))
    model.save_pretrained(folder, max_shard_size=recipe.shard_bytes or "10GB")


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _model(recipe: Recipe, end: int) -> torch.nn.Module:
    import transformers

    own = {"family", "tied", "dtype", "shard_bytes", "seed"}
    values = {key: value for key, value in asdict(recipe).items() if key not in own}
    if recipe.family == "qwen3_5":
        values = {key: value for key, value in values.items() if "expert" not in key and "moe" not in key}
    if recipe.family == "qwen3_5_moe":
        del values["intermediate_size"]
    values |= {
        "vocab_size": VOCAB,
        "num_hidden_layers": len(recipe.layer_types),
        "layer_types": list(recipe.layer_types),
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": recipe.tied,
        "eos_token_id": end,
        "pad_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    config_of = {
        "qwen3_5": transformers.Qwen3_5TextConfig,
        "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
        "qwen3_next": transformers.Qwen3NextConfig,
    }
    model_of = {
        "qwen3_5": transformers.Qwen3_5ForCausalLM,
        "qwen3_5_moe": transformers.Qwen3_5MoeForCausalLM,
        "qwen3_next": transformers.Qwen3NextForCausalLM,
    }
    return model_of[recipe.family](config_of[recipe.family](**values)).float()


@torch.no_grad()
def _fill(model: torch.nn.Module, recipe: Recipe, words: list[int]) -> None:
    """Seeded weights of the kinds that the module's docstring tells."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            low, high = map(math.log, MEMORY_TOKENS)
            weight.copy_(-(low + (high - low) * torch.rand(weight.shape, generator=generator)))
        elif name.endswith("dt_bias"):
            weight.fill_(1.0)
        elif name.endswith("norm.weight"):
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
        elif "embed_tokens" in name:
            weight.normal_(0.0, 1.0, generator=generator)
        elif "conv1d" in name:
            weight.normal_(0.0, 0.5, generator=generator)
        elif weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    head = model.get_output_embeddings().weight
    if recipe.tied:  # the table is the head: rows of unlikely tokens are made small instead of zero
        scale = torch.full((VOCAB, 1), 0.05)
        scale[words] = 1.0
        head.mul_(scale * WORD_LOGITS * recipe.hidden_size**-0.5)
    else:
        head.zero_()
        rows = torch.randn(len(words), recipe.hidden_size, generator=generator)
        head[words] = rows * WORD_LOGITS * recipe.hidden_size**-0.5

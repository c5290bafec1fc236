"""MiniMax."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class MiniMax:
    """The sizes of one checkpoint."""

    layer_types: tuple[str, ...] = (LINEAR, FULL)
    hidden_size: int = 64
    intermediate_size: int = 48  # of an expert
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    linear_attn_alpha_factor: float = 1.5
    linear_attn_beta_factor: float = 1.0
    full_attn_alpha_factor: float = 1.25
    full_attn_beta_factor: float = 0.75
    mlp_alpha_factor: float = 1.5
    mlp_beta_factor: float = 1.0
    tied: bool = False
    shard_bytes: int | None = None

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.model, self.tied, shard_bytes=self.shard_bytes)

    def model(self, end: int) -> torch.nn.Module:
        """transformers' model, random as it makes it."""
        import transformers

        values = {key: value for key, value in asdict(self).items() if key not in ("tied", "shard_bytes")}
        values |= {"num_hidden_layers": len(self.layer_types), "layer_types": list(self.layer_types)}
        config = transformers.MiniMaxConfig(
            **values,
            vocab_size=VOCAB,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        return transformers.MiniMaxForCausalLM(config)


SMALL = MiniMax()
MODELS = {
    "minimax": SMALL,
    "minimax_tied_sharded": replace(SMALL, tied=True, layer_types=(FULL, LINEAR, LINEAR), shard_bytes=300_000),
    "minimax_odd_heads": replace(
        SMALL,
        layer_types=(LINEAR, LINEAR, FULL, LINEAR),
        hidden_size=72,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=40,
        num_local_experts=5,
        num_experts_per_tok=3,
    ),
}
RECIPES = {name: model.recipe for name, model in MODELS.items()}

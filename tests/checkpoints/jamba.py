"""Jamba."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB


def short_steps(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Steps of about a third where the projection of the step is 0."""
    weight.fill_(-1.0).add_(torch.randn(weight.shape, generator=generator), alpha=0.3)


def narrow(weight: torch.Tensor, generator: torch.Generator) -> None:
    """A product of normed rows that leaves steps about as they are."""
    weight.normal_(0.0, 0.3 * weight.shape[-1] ** -0.5, generator=generator)


FILL = {"dt_proj.bias": short_steps, "dt_proj.weight": narrow}


@dataclass(frozen=True)
class Jamba:
    """The sizes of one checkpoint."""

    num_hidden_layers: int = 3
    attn_layer_period: int = 3
    attn_layer_offset: int = 1
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    hidden_size: int = 64
    intermediate_size: int = 96
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_experts: int = 1
    num_experts_per_tok: int = 2
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    tied: bool = False
    shard_bytes: int | None = None

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.model, self.tied, shard_bytes=self.shard_bytes, fill=FILL)

    def model(self, end: int) -> torch.nn.Module:
        """transformers' model, random as it makes it."""
        import transformers

        own = {"tied", "shard_bytes"}
        values = {key: value for key, value in asdict(self).items() if key not in own}
        config = transformers.JambaConfig(
            **values,
            vocab_size=VOCAB,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
        )
        return transformers.JambaForCausalLM(config)


DENSE = Jamba()
MOE = Jamba(num_experts=5)
MODELS = {
    "jamba": DENSE,
    "jamba_moe": MOE,
    "jamba_tied_biases": replace(DENSE, tied=True, mamba_proj_bias=True, mamba_conv_bias=False),
    "jamba_odd": replace(
        MOE,
        num_hidden_layers=4,
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        mamba_d_state=11,
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_dt_rank=7,
        num_experts=3,
        num_experts_per_tok=3,
        shard_bytes=300_000,
    ),
}
RECIPES = {name: model.recipe for name, model in MODELS.items()}

"""Mamba and Falcon Mamba."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.checkpoints.jamba import FILL
from tests.checkpoints.recipe import Recipe
from tests.checkpoints.tokenizer import VOCAB


@dataclass(frozen=True)
class Mamba:
    """The sizes of one checkpoint."""

    falcon: bool = False
    num_hidden_layers: int = 2
    hidden_size: int = 64
    state_size: int = 16
    conv_kernel: int = 4
    expand: int = 2
    time_step_rank: int | str = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    tied: bool = True

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.model, self.tied, fill=FILL)

    def model(self, end: int) -> torch.nn.Module:
        """transformers' model, random as it makes it."""
        import transformers

        values = {key: value for key, value in vars(self).items() if key not in ("falcon", "tied")}
        values |= {"vocab_size": VOCAB, "tie_word_embeddings": self.tied}
        values |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        if self.falcon:
            return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**values))
        return transformers.MambaForCausalLM(transformers.MambaConfig(**values))


MODELS = {
    "mamba": Mamba(),
    "falcon_mamba": Mamba(
        falcon=True,
        num_hidden_layers=2,
        hidden_size=72,
        state_size=11,
        conv_kernel=3,
        expand=3,
        time_step_rank=7,
        use_bias=True,
        use_conv_bias=False,
        tied=False,
    ),
}
RECIPES = {name: model.recipe for name, model in MODELS.items()}

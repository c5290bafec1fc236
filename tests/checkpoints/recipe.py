"""Recipe of a family's small checkpoint, and the function that writes it.

Weights make caching visible: states decay slowly, so what came long before changes the logits, and only words that
encode back to themselves are ever likely, so greedy text does not end early.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.checkpoints.tokenizer import VOCAB, sayable, train
from training.bpe import TURN_END, config

MEMORY_TOKENS = (20.0, 5000.0)
WORD_LOGITS = 5.0  # standard deviation over the likely words
END = "<end>"
COMMON = {"vocab_size": VOCAB, "eos_token_id": END, "pad_token_id": END}

Sizes = dict[str, Any]
Fill = Callable[[torch.Tensor, torch.Generator], object]  # fills a weight in place


@dataclass(frozen=True)
class Recipe:
    """One random checkpoint; of VOCAB tokens, all with one tokenizer."""

    model: Callable[[int], torch.nn.Module]  # the id that ends a text -> transformers' model, or one of our own
    tied: bool = False
    dtype: str = "float32"
    shard_bytes: int | None = None
    seed: int = 0
    fill: dict[str, Fill] = field(default_factory=dict)  # end of a parameter's name -> how it is filled, beside FILL
    rewrite: Callable[[Path], object] = lambda folder: None  # changes what transformers saved


@dataclass(frozen=True)
class Family:
    """Classes of transformers by name, the sizes of all of a family's checkpoints, and how weights are filled."""

    config: str
    model: str
    sizes: Sizes
    fill: dict[str, Fill] = field(default_factory=dict)
    change: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model

    def recipe(self, dtype: str = "float32", shard_bytes: int | None = None, **sizes: Any) -> Recipe:
        """Return the recipe of a checkpoint with these sizes instead of the family's; END stands for the end's id."""
        values = COMMON | self.sizes | sizes
        if "layer_types" in values:
            values["num_hidden_layers"] = len(values["layer_types"])

        def model(end: int) -> torch.nn.Module:
            import transformers

            config = getattr(transformers, self.config)(**{key: end if x is END else x for key, x in values.items()})
            return self.change(getattr(transformers, self.model)(config))

        return Recipe(model, values.get("tie_word_embeddings", False), dtype, shard_bytes, fill=self.fill)


def slow_decay(weight: torch.Tensor, generator: torch.Generator) -> None:
    """log of decay rates, so that with a step of about 1 states last for MEMORY_TOKENS."""
    low, high = map(math.log, MEMORY_TOKENS)
    weight.copy_(-(low + (high - low) * torch.rand(weight.shape, generator=generator)))


def about_itself(weight: torch.Tensor, generator: torch.Generator) -> None:
    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


FILL: dict[str, Fill] = {
    "A_log": slow_decay,
    "dt_bias": lambda weight, generator: weight.fill_(1.0),
    "norm.weight": about_itself,
    "embed_tokens.weight": lambda weight, generator: weight.normal_(0.0, 1.0, generator=generator),
    "embeddings.weight": lambda weight, generator: weight.normal_(0.0, 1.0, generator=generator),
    "conv1d.weight": lambda weight, generator: weight.normal_(0.0, 0.5, generator=generator),
    "bias": lambda weight, generator: weight.normal_(0.0, 0.1, generator=generator),
}


def correct(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with corrections of its routers that are large enough to change a choice."""
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def write(folder: Path, recipe: Recipe) -> None:
    """Write the checkpoint as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config()))
    end = tokenizer.token_to_id(TURN_END)
    model = recipe.model(end).float()
    fill(model, recipe, sayable(tokenizer))
    model.generation_config.update(do_sample=False, eos_token_id=end, pad_token_id=end)
    model = model.to(getattr(torch, recipe.dtype))
    model.save_pretrained(folder, max_shard_size=recipe.shard_bytes or "10GB")
    recipe.rewrite(folder)


@cache
def _tokenizer() -> Tokenizer:
    return train()


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def fill(model: torch.nn.Module, recipe: Recipe, words: list[int]) -> None:
    """Seeded weights of the kinds that the module's docstring tells."""
    generator = torch.Generator().manual_seed(recipe.seed)
    fills = recipe.fill | {name: how for name, how in FILL.items() if name not in recipe.fill}
    for name, weight in model.named_parameters():
        how = next((how for end, how in fills.items() if name.endswith(end)), None)
        if how is not None:
            how(weight, generator)
        elif weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    head = model.get_output_embeddings().weight
    scale = WORD_LOGITS * head.shape[1] ** -0.5
    if recipe.tied:  # the table is the head: rows of unlikely tokens are made small instead of zero
        rows = torch.full((VOCAB, 1), 0.05)
        rows[words] = 1.0
        head.mul_(rows * scale)
    else:
        head.zero_()
        head[words] = torch.randn(len(words), head.shape[1], generator=generator) * scale

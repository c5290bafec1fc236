"""Score of a model on held-out names, values and wordings.

N sequences of a length, T tokens of each.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from training.answers import answers, shares
from training.model import TrainedHybrid
from training.recipe import Recipe
from training.source import Source
from training.tasks.example import MEMORY, PERSONA, RECALL, TOOL
from training.tasks.split import TEST

MIXTURES: tuple[Mapping[str, float], ...] = (dict.fromkeys(RECALL, 1.0), {MEMORY: 1.0}, {PERSONA: 1.0}, {TOOL: 1.0})
FEWEST = 4  # sequences of each mixture at each length


def held_out(model: TrainedHybrid, source: Source, lengths: Iterable[int], recipe: Recipe) -> list[dict[str, float]]:
    """A row for each length: how many answers of a kind there are (`n_…`), and the share that is right (`right_…`).

    Right are those all of whose tokens are the most likely ones, as in the log of the training. The same recipe and
    tokenizer give the same questions.
    """
    return [{"length": length, **shares(_answers(model, source, length, recipe))} for length in lengths]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # a shape comes once
def _answers(model: TrainedHybrid, source: Source, length: int, recipe: Recipe) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = defaultdict(list)
    for mixture in MIXTURES:
        rng = random.Random(f"{recipe.seed}/{length}/{' '.join(mixture)}")
        for _ in range(max(FEWEST, recipe.held_out // length)):
            ids, labels = source.sequence(rng, length, next(iter(mixture)), dict(mixture), TEST)
            token_1T, label_1T = torch.tensor([ids], device=model.embed.device), torch.tensor([labels])
            likely_1T = model.logits(model.hidden(token_1T)[:, :-1]).argmax(-1)
            right_1T = (likely_1T == token_1T[:, 1:]).cpu()
            for kind, right in answers(label_1T[:, 1:], right_1T).items():
                if kind in mixture:
                    found[kind] += right
    return found

"""Sequences of a step: drawn only from the recipe's seed and the step's number, by a process next to the training's.

B sequences, T tokens of each.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty

import numpy as np
import torch

from training.recipe import Recipe
from training.segments import SEAMS, first_seen
from training.source import Source
from training.tasks.example import RECALL

AHEAD = 8  # batches
LOOKED_EVERY = 5.0  # seconds, at the process that draws them


@dataclass(frozen=True)
class Batch:
    token_BT: torch.Tensor  # int64
    label_BT: torch.Tensor  # uint8: its label's place in LABELS
    seen_BT: torch.Tensor | None = None  # int64: the first position that it sees; None where all see all before them

    def to(self, device: str) -> Batch:
        """The same on another device."""
        return Batch(*(x if x is None else x.to(device) for x in (self.token_BT, self.label_BT, self.seen_BT)))  # type: ignore[arg-type]


def draw(recipe: Recipe, source: Source, step: int) -> Batch:
    """The batch of a step: each sequence one conversation, or more until it is full."""
    stage = recipe.stage_at(step)
    rng = random.Random(f"{recipe.seed}/{step}")
    token_BT = np.zeros((stage.sequences, stage.length), dtype=np.int64)
    label_BT = np.zeros((stage.sequences, stage.length), dtype=np.uint8)
    recall = {kind: share for kind, share in stage.shares.items() if kind in RECALL}
    kinds = rng.choices(list(stage.shares), list(stage.shares.values()), k=stage.sequences)
    for row, kind in enumerate(kinds):
        ids, labels = source.sequence(rng, stage.length, kind, recall)
        token_BT[row, : len(ids)] = ids
        label_BT[row, : len(ids)] = labels
    return Batch(torch.from_numpy(token_BT), torch.from_numpy(label_BT), _seen(recipe, source, step, token_BT))


def _seen(recipe: Recipe, source: Source, step: int, token_BT: np.ndarray) -> torch.Tensor | None:
    """Return the first token that each token sees, in a step with independent segments; None in any other step."""
    rng = random.Random(f"{recipe.seed}/{step}/apart")
    if rng.random() >= recipe.apart:
        return None
    seen_BT = np.stack([first_seen(row.tolist(), source.marks, rng.choice(SEAMS)) for row in token_BT])
    return torch.from_numpy(seen_BT) if seen_BT.any() else None


def _produce(recipe: Recipe, tokenizer: Path, texts: Path | None, first: int, queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    source = Source.load(tokenizer, texts)
    for step in range(first, recipe.steps):
        batch = draw(recipe, source, step)
        queue.put([x if x is None else x.numpy() for x in (batch.token_BT, batch.label_BT, batch.seen_BT)])


def _taken(queue: multiprocessing.Queue, process: BaseProcess) -> list[np.ndarray | None]:  # type: ignore[type-arg]
    """Raises RuntimeError where the other process ended before its time; it has told why."""
    while True:
        try:
            return queue.get(timeout=LOOKED_EVERY)
        except Empty:
            if not process.is_alive():
                raise RuntimeError(f"drawing batches ended with exit code {process.exitcode}") from None


def batches(recipe: Recipe, tokenizer: Path, texts: Path | None, first: int) -> Iterator[Batch]:
    """All batches from step `first` on, made ahead in another process. `tokenizer` is a tokenizer.json."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(AHEAD)
    process = context.Process(target=_produce, args=(recipe, tokenizer, texts, first, queue), daemon=True)
    process.start()
    try:
        for _ in range(first, recipe.steps):
            yield Batch(*(x if x is None else torch.from_numpy(x) for x in _taken(queue, process)))  # type: ignore[arg-type]
    finally:
        process.terminate()
        process.join()

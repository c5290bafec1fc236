"""Trains a model: steps, a log, checkpoints from which a later run continues.

B sequences, T tokens of each, S targets of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headwater.models.families import read_config
from training.answers import answers, shares
from training.batches import Batch, batches
from training.export import TOKENIZER
from training.held_out import held_out
from training.model import TrainedHybrid
from training.muon import Muon
from training.recipe import Recipe
from training.segments import Apart
from training.source import Source

LOG, STATE = "log.jsonl", "state.pt"
SAVED_EVERY = 100  # steps
CLIP = 1.0  # norm of all gradients together


def progress(step: int, recipe: Recipe, told: str, tokens_a_second: float) -> str:
    """Return the line that is printed after a step."""
    length = recipe.stage_at(step - 1).length
    return f"step {step} of {recipe.steps}  length {length}  {told}  {tokens_a_second:,.0f} tokens/s"


class Training:
    """A model, its optimisers, and how far they are."""

    def __init__(self, recipe: Recipe, folder: Path, device: str = "cpu") -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.model = TrainedHybrid.random(read_config(recipe.config, "float32"), recipe.seed).to(device)
        matrices = {id(p) for part in self.model.parts for p in part.parameters() if p.dim() == 2}
        rest = [p for p in self.model.parameters() if id(p) not in matrices]
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon([p for p in self.model.parameters() if id(p) in matrices], recipe.muon_lr, decay=0.05),
            torch.optim.AdamW(rest, recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step = 0
        if (folder / STATE).exists():
            self._restore(torch.load(folder / STATE, map_location=device, weights_only=False))

    def run(self, texts: Path | None, until: int | None = None) -> Iterator[dict[str, Any]]:
        """Train to the end of the recipe, or to a step before it; yields what the log has of each step.

        The last one of a stage has held-out answers as well, of each length so far.
        """
        last = self.recipe.steps if until is None else until
        drawn = batches(self.recipe, self.folder / TOKENIZER, texts, self.step)
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            for batch in drawn:
                if self.step >= last:
                    break
                entry = self.learn(batch)
                if lengths := self.recipe.lengths_until(self.step):
                    source = Source.load(self.folder / TOKENIZER, None)
                    entry["held_out"] = held_out(self.model, source, lengths, self.recipe)
                log.write(json.dumps(entry) + "\n")
                log.flush()
                yield entry
                if self.step % SAVED_EVERY == 0:
                    self.save()
        drawn.close()  # type: ignore[attr-defined]
        self.save()

    def learn(self, batch: Batch) -> dict[str, Any]:
        """One step; what the log has of it."""
        start, rate = time.perf_counter(), self.recipe.rate_at(self.step)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group.setdefault("initial", group["lr"])
                group["lr"] = group["initial"] * rate
        loss, measured = losses(self.model, batch.to(self.device), self.recipe, self.step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - start
        tokens = batch.token_BT.numel()
        return {
            "step": self.step,
            "length": batch.token_BT.shape[1],
            "tokens": tokens,
            "apart": batch.seen_BT is not None,
            "rate": rate,
            **measured,
            "norm": float(norm),
            "seconds": seconds,
        }

    def save(self) -> None:
        """All that a later run needs; the file is replaced whole."""
        state = {
            "step": self.step,
            "recipe": self.recipe,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        new = self.folder / (STATE + ".new")
        torch.save(state, new)
        new.replace(self.folder / STATE)

    def _restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of a model of another shape."""
        for name in ("hidden", "layers", "heads", "intermediate", "vocabulary"):
            saved, ours = getattr(state["recipe"], name), getattr(self.recipe, name)
            if saved != ours:
                raise ValueError(f"{self.folder / STATE} has {name} {saved}, the recipe {ours}")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def losses(model: TrainedHybrid, batch: Batch, recipe: Recipe, step: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy of the answers and of a share of all other tokens, and the fields of the log.

    `right_…` is the share of answers of a kind all of whose tokens are the most likely ones: what greedy decoding would
    say. `n_…` is how many there are.
    """
    target_BT, label_BT = batch.token_BT[:, 1:], batch.label_BT[:, 1:]
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    drawn_BT = (torch.rand(target_BT.shape, generator=generator) < recipe.context).to(target_BT.device)
    chosen_BT = (label_BT > 0) | (drawn_BT & (target_BT != 0))
    apart = None if batch.seen_BT is None else Apart(batch.seen_BT)
    hidden_SC = model.hidden(batch.token_BT, apart)[:, :-1][chosen_BT]
    logits_SV = model.logits(hidden_SC).float()
    target_S, label_S = target_BT[chosen_BT], label_BT[chosen_BT]
    each_S = F.cross_entropy(logits_SV, target_S, reduction="none")
    loss = each_S.mean()
    with torch.no_grad():
        right_BT = torch.ones_like(chosen_BT)
        right_BT[chosen_BT] = logits_SV.argmax(-1) == target_S
        measured = {"loss": float(loss)}
        if bool((label_S > 1).any()):
            measured["answer_loss"] = float(each_S[label_S > 1].mean())
    return loss, measured | shares(answers(label_BT, right_BT))

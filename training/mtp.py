"""Trains a head of multi-token prediction for a model whose own weights stay as they are.

    python -m training.mtp --model FOLDER --out FOLDER [--texts FOLDER] [--recipe head]

The head learns what the model says: the loss is the cross-entropy of its distribution with the model's own, for the
tokens that the assistant says and a share of all others. A step teaches DEPTH drafts, one after the other. As in
serving, each takes the head's last hidden state in place of the model's, and sees entries of the tokens before it that
are made of the model's hidden states, and of the drafts before it that are made of the head's.

B sequences, T tokens of each, C model width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from headwater.layers.architecture import Architecture, MtpHead
from headwater.models.families import read_config
from training.batches import Batch, batches
from training.export import TOKENIZER, adopt
from training.loop import CLIP, progress
from training.model import AttentionLayer, MlpLayer, Norm, TrainedHybrid, Weights, begin, compiled
from training.muon import Muon
from training.recipe import RECIPES, Recipe

DEPTH = 3  # drafts
TARGET_MULTIPLE = 128  # number of targets, so that few sizes are compiled
MODEL_FILE = "model.safetensors"
SHOWN_EVERY, SAVED_EVERY = 20, 100  # steps


class TrainedMtp(nn.Module):
    """A head of one block, attention and MLP, over a model that it shares embedding and last product with."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> None:
        super().__init__()
        head, width = architecture.mtp, architecture.hidden_size
        assert head is not None
        self.architecture, self.names = architecture, head
        attention, mlp = (block.parts[0].layer for block in head.blocks)
        self.attention, self.mlp = AttentionLayer(attention, dtype), MlpLayer(mlp, dtype)  # type: ignore[arg-type]
        self.product = Weights({"product.weight": (width, 2 * width)}, dtype)
        self.norms = nn.ParameterList(torch.zeros(width) for _ in (*head.blocks, "embedding", "hidden", "final"))
        generator = torch.Generator().manual_seed(seed)
        for part in (self.attention, self.mlp, self.product):
            for name in part.names:
                begin(name, part[name].data, generator)

    def norm(self, number: int) -> Norm:
        """Return a norm: before attention, before the MLP, of embeddings, of hidden states, after all."""
        return Norm(self.norms[number], self.architecture.norm_offset, self.architecture.norm_eps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights under the names of a checkpoint, float32."""
        head: MtpHead = self.names
        norms = (*(block.norm for block in head.blocks), head.embedding_norm, head.hidden_norm, head.final_norm)
        named = dict(zip(norms, self.norms, strict=True)) | {head.product: self.product["product.weight"]}
        for block, part in zip(head.blocks, (self.attention, self.mlp), strict=True):
            named |= {f"{block.parts[0].at}.{name}": part[name] for name in part.names}
        return {name: tensor.detach() for name, tensor in named.items()}

    def drafts(self, model: TrainedHybrid, token_BT: torch.Tensor, hidden_BTC: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the head's hidden states [B, T − d, C] of draft d = 1, 2, …; row i drafts token i + d + 1.

        Row i of draft d is the entry of token i + d, and follows from the model's hidden states up to i.
        """
        before_BMC, keys, values = hidden_BTC, list[torch.Tensor](), list[torch.Tensor]()
        for depth in range(1, DEPTH + 1):
            n = token_BT.shape[1] - depth
            embedded = F.embedding(token_BT[:, depth:], model.embed)
            both = torch.cat((self.norm(2)(embedded), self.norm(3)(before_BMC[:, :n])), -1)
            x = self.product.product(both, "product").float()
            q, k, v, gate = self.attention.project(self.norm(0)(x), first=depth)
            keys, values = [*(old[:, :, :n] for old in keys), k], [*(old[:, :, :n] for old in values), v]
            seen = (torch.cat(keys, 2), torch.cat(values, 2))
            read = F.scaled_dot_product_attention(q, *seen, attn_mask=_seen(n, depth))
            x = self.mlp.fed(x + self.attention.finish(read, gate), self.norm(1))
            before_BMC = self.norm(4)(x)
            yield before_BMC


def _seen(n: int, depth: int) -> torch.Tensor:
    """Return what row i of a draft sees, [n, depth · n]: entries of first drafts up to i, and i of later drafts."""
    first, own = torch.ones(n, n, dtype=torch.bool).tril(), torch.eye(n, dtype=torch.bool)
    return torch.cat([first, *[own] * (depth - 1)], 1)


def loss_of(
    head: TrainedMtp, model: TrainedHybrid, batch: Batch, share: float, seed: int
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and for each draft the share of answers' tokens that it predicts as the model does."""
    with torch.no_grad():
        hidden_BTC = model.hidden(batch.token_BT)
    generator = torch.Generator().manual_seed(seed)
    drawn_BT = torch.rand(batch.token_BT.shape, generator=generator) < share
    chosen_BT = (batch.label_BT > 0) | (drawn_BT & (batch.token_BT != 0))
    losses, right = [], []
    for depth, own_BMC in enumerate(head.drafts(model, batch.token_BT, hidden_BTC), start=1):
        # row i drafts token i + depth + 1, which the model says from its hidden state at i + depth
        row_S, at_S = _few_sizes(chosen_BT[:, depth + 1 :].nonzero())
        with torch.no_grad():
            said_SV = model.logits(hidden_BTC[row_S, at_S + depth]).float()
        logits_SV = model.logits(own_BMC[row_S, at_S]).float()
        losses.append(F.cross_entropy(logits_SV, said_SV.softmax(-1)))
        answers = batch.label_BT[row_S, at_S + depth + 1] > 0
        right.append(float((logits_SV.argmax(-1) == said_SV.argmax(-1))[answers].float().mean()))
    return torch.stack(losses).mean(), right


def _few_sizes(chosen_S2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return rows and places of a multiple of TARGET_MULTIPLE targets: each new size compiles products again."""
    return chosen_S2[: max(len(chosen_S2) // TARGET_MULTIPLE, 1) * TARGET_MULTIPLE].unbind(1)


class Learned(NamedTuple):
    """A step of training."""

    step: int
    loss: float
    right: list[float]  # share of right drafts, of the first one, the second, …


def train(
    head: TrainedMtp, model: TrainedHybrid, recipe: Recipe, texts: Path | None, tokenizer: Path
) -> Iterator[Learned]:
    """Train a head in place; `tokenizer` is a tokenizer.json."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() < 2]
    optimisers: list[torch.optim.Optimizer] = [
        Muon(matrices, recipe.muon_lr, decay=0.05),
        torch.optim.AdamW(vectors, recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for step, batch in enumerate(batches(recipe, tokenizer, texts, 0)):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group.setdefault("initial", group["lr"])
                group["lr"] = group["initial"] * recipe.rate_at(step)
        loss, right = loss_of(head, model, batch, recipe.context, recipe.seed * 1_000_003 + step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        yield Learned(step + 1, float(loss.detach()), right)


def frozen(folder: Path) -> TrainedHybrid:
    """Return the model of a checkpoint, whose weights stay as they are."""
    model = TrainedHybrid(read_config(json.loads((folder / "config.json").read_text()), "float32"))
    adopt(model, folder)
    return model.requires_grad_(False)


def write(head: TrainedMtp, model_folder: Path, out: Path) -> None:
    """Copy the model's folder, with the head among its tensors, in their dtype."""
    shutil.copytree(model_folder, out, dirs_exist_ok=True)
    stored = load_file(model_folder / MODEL_FILE)
    dtype = stored[f"model.{head.architecture.final_norm}"].dtype
    stored |= {name: tensor.to(dtype).contiguous() for name, tensor in head.tensors().items()}
    save_file(stored, out / MODEL_FILE, metadata={"format": "pt"})
    config = json.loads((model_folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint with the head")
    parser.add_argument("--texts", type=Path, help="folder of plain text; without it a few paragraphs")
    parser.add_argument("--recipe", choices=[name for name in RECIPES if "head" in name], default="head")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    given = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.set_num_threads(given.threads)
    if given.compile:
        compiled()
    recipe, began, tokens = RECIPES[given.recipe], time.perf_counter(), 0
    model = frozen(given.model)
    head = TrainedMtp(model.architecture, seed=recipe.seed)
    shown: list[tuple[float, list[float]]] = []
    for step, loss, right in train(head, model, recipe, given.texts, given.model / TOKENIZER):
        stage = recipe.stage_at(step - 1)
        tokens += stage.length * stage.sequences
        shown.append((loss, right))
        if step % SHOWN_EVERY == 0 or step == recipe.steps:
            losses, rights = zip(*shown, strict=True)
            shares = "  ".join(f"{100 * sum(column) / len(column):.1f}%" for column in zip(*rights, strict=True))
            told, speed = (
                f"loss {sum(losses) / len(losses):.3f}  right {shares}",
                tokens / (time.perf_counter() - began),
            )
            print(progress(step, recipe, told, speed), flush=True)
            shown = []
        if step % SAVED_EVERY == 0 or step == recipe.steps:
            write(head, given.model, given.out)


if __name__ == "__main__":
    main()

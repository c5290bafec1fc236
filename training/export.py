"""Writes a trained model as a checkpoint in Hugging Face's files and names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training import template
from training.bpe import END_OF_TEXT, TURN_END, config
from training.model import TrainedHybrid, Weights
from training.recipe import Recipe

TOKENIZER = "tokenizer.json"


def tensors(model: TrainedHybrid) -> dict[str, torch.Tensor]:
    """All weights under the names of a checkpoint, float32."""
    architecture = model.architecture
    named = {f"model.{architecture.embedding}": model.embed, f"model.{architecture.final_norm}": model.final_norm}
    if model.head is not None:
        named[architecture.head] = model.head
    for block, norm, part in zip(architecture.blocks, model.norms, model.parts, strict=True):
        assert isinstance(part, Weights)
        named[f"model.{block.norm}"] = norm
        named |= {f"model.{block.parts[0].at}.{name}": part[name] for name in part.names}
    return {name: tensor.detach() for name, tensor in named.items()}


@torch.no_grad()
def adopt(model: TrainedHybrid, folder: Path) -> None:
    """Take the weights of an exported checkpoint. KeyError for one that it lacks, RuntimeError for another shape."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors(model).items():
        tensor.copy_(stored[name])


def export(model: TrainedHybrid, recipe: Recipe, tokenizer: Path, folder: Path, dtype: torch.dtype) -> None:
    """A folder that `headwater serve` takes. `tokenizer` is a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    shutil.copyfile(template.FILE, folder / template.FILE.name)
    ids = Tokenizer.from_file(str(tokenizer))
    end, pad = ids.token_to_id(TURN_END), ids.token_to_id(END_OF_TEXT)
    _write(folder / "tokenizer_config.json", config())
    _write(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad})
    name = str(dtype).removeprefix("torch.")
    _write(folder / "config.json", recipe.config | {"dtype": name, "eos_token_id": end, "pad_token_id": pad})
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in tensors(model).items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

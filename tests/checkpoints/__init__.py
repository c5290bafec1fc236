"""Hugging Face checkpoints by name: random ones of all families, one file a family, and the one that is trained."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headwater.models.embedded import embedded
from tests.checkpoints import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    mamba,
    mamba2,
    minimax,
    nemotron_h,
    qwen,
    qwen3,
    recipe,
    ring,
)
from tests.checkpoints.recipe import Recipe, write

RECIPES: dict[str, Recipe] = {
    **qwen.RECIPES,
    **qwen3.RECIPES,
    **granite.RECIPES,
    **bamba.RECIPES,
    **mamba2.RECIPES,
    **minimax.RECIPES,
    **ring.RECIPES,
    **jamba.RECIPES,
    **mamba.RECIPES,
    **kimi_linear.RECIPES,
    **bailing_hybrid.RECIPES,
    **falcon_h1.RECIPES,
    **nemotron_h.RECIPES,
}
SMALLEST = {  # of each family, by its name
    "Qwen3.5": "qwen3_5",
    "Qwen3-Next": "qwen3_next",
    "Qwen3": "qwen3",
    "Granite 4": "granite",
    "Bamba": "bamba",
    "Mamba-2": "mamba2",
    "MiniMax": "minimax",
    "Ring-linear": "ring",
    "Jamba": "jamba",
    "Mamba": "mamba",
    "Kimi-Linear": "kimi_linear",
    "Ling 3.0": "ling",
    "Falcon-H1": "falcon_h1",
    "Nemotron-H": "nemotron_h",
}
TRAINED = "headwater_tiny"  # comes with the package
OWN = {"bailing_moe_linear": ring.oracle}  # by model type


def oracle(folder: Path) -> torch.nn.Module:
    """The checkpoint as transformers loads it, or as our own model does where transformers has none."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return OWN.get(model_type, recipe.oracle)(folder)


def checkpoint(root: Path, name: str) -> Path:
    """The folder of TRAINED, or of a recipe's checkpoint below `root`, written if it is not there."""
    if name == TRAINED:
        return embedded()
    folder = root / name
    if not (folder / "config.json").exists():
        write(folder, RECIPES[name])
    return folder


__all__ = ["RECIPES", "SMALLEST", "TRAINED", "Recipe", "checkpoint", "oracle", "write"]

"""Random Hugging Face checkpoints of all families, by name: what the model code is held to. One file a family."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import bamba, granite, mamba2, jamba, qwen
from tests.checkpoints.recipe import Recipe, oracle, write

RECIPES: dict[str, Recipe] = {
    **qwen.RECIPES,
    **granite.RECIPES,
    **bamba.RECIPES,
    **mamba2.RECIPES,
    **jamba.RECIPES,
}
SMALLEST = {  # of each family, by its name
    "Qwen3.5": "qwen3_5",
    "Qwen3-Next": "qwen3_next",
    "Granite 4": "granite",
    "Bamba": "bamba",
    "Mamba-2": "mamba2",
    "Jamba": "jamba",
}


def checkpoint(root: Path, name: str) -> Path:
    """The folder of a recipe's checkpoint below `root`, written if it is not there."""
    folder = root / name
    if not (folder / "config.json").exists():
        write(folder, RECIPES[name])
    return folder


__all__ = ["RECIPES", "SMALLEST", "Recipe", "checkpoint", "oracle", "write"]

"""Hugging Face checkpoints by name: random ones of all families, and the one that is trained."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import torch

from headwater.models.files import embedded
from tests.checkpoints import (
    gpt_oss,
    lara_mini,
    linear_attention,
    ling_2_5,
    olmo_hybrid,
    qwen,
    recipe,
    ring,
    short_convolutions,
    state_spaces,
)
from tests.checkpoints.recipe import Recipe, write

GROUPS = (qwen, state_spaces, linear_attention, ring, ling_2_5, short_convolutions, gpt_oss, olmo_hybrid, lara_mini)
RECIPES: dict[str, Recipe] = {name: one for group in GROUPS for name, one in group.RECIPES.items()}
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
    "Ling 2.5": "ling_2_5",
    "Falcon-H1": "falcon_h1",
    "Nemotron-H": "nemotron_h",
    "LFM2": "lfm2",
    "gpt-oss": "gpt_oss",
    "OLMo-Hybrid": "olmo_hybrid",
    "Lara-mini": "lara_mini",
}
TRAINED = "headwater_tiny"  # comes with the package
OWN = {  # by class
    "BailingMoeLinearV2ForCausalLM": ring.oracle,
    "BailingMoeV2_5ForCausalLM": ling_2_5.ling_oracle,
    "BailingHybridForCausalLM": linear_attention.ling_oracle,
}


def oracle(folder: Path) -> torch.nn.Module:
    """The checkpoint as transformers loads it, or as our own code does for parts that transformers lacks."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return OWN.get(name, recipe.oracle)(folder)


def checkpoint(root: Path, name: str) -> Path:
    """The folder of TRAINED, or of a recipe's checkpoint below `root`: a copy of that of the run, if there is one."""
    if name == TRAINED:
        return embedded()
    folder = root / name
    if not (folder / "config.json").exists():
        if "HEADWATER_TEST_CHECKPOINTS" in os.environ:
            shutil.copytree(of_run(name), folder)
        else:
            write(folder, RECIPES[name])
    return folder


def of_run(name: str) -> Path:
    """The folder of TRAINED, or of a recipe's checkpoint in HEADWATER_TEST_CHECKPOINTS, written once."""
    root = Path(os.environ["HEADWATER_TEST_CHECKPOINTS"])
    root.mkdir(parents=True, exist_ok=True)
    folder, written = _folder(root, name), root / f"{name}.written"
    with written.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.seek(0, os.SEEK_END):  # another process may have written it since the file was opened
            if name != TRAINED:
                write(folder, RECIPES[name])
            file.write(json.dumps(_files(folder)))
    return folder


def changed_in_run() -> list[str]:
    """Return the files that are not as `of_run` left them, each once: all tests and processes of a run share them."""
    root, changed = Path(os.environ["HEADWATER_TEST_CHECKPOINTS"]), set()
    for written in root.glob("*.written"):
        if not written.stat().st_size:  # another process writes the checkpoint
            continue
        with written.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before, now = json.load(file), _files(_folder(root, written.stem))
            if before != now:
                changed |= {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
                file.seek(0)
                file.truncate()
                file.write(json.dumps(now))
    return sorted(changed)


def _folder(root: Path, name: str) -> Path:
    return embedded() if name == TRAINED else root / name


def _files(folder: Path) -> dict[str, list[int]]:
    """Return the size of each file in bytes, and when it was last changed, in ns."""
    stats = {str(path): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


__all__ = ["RECIPES", "SMALLEST", "TRAINED", "Recipe", "changed_in_run", "checkpoint", "of_run", "oracle", "write"]

"""Results of the project: JSON files that name the clean commit, the seed and the machine of their run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from headwater.cache_folder import write_whole
from headwater.errors import ConfigError
from headwater.machine import cpu

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
TREES = ("clean", "dirty", "not recorded")  # the working tree of a run; only clean ones are written
Seed = int | list[int] | None
# results and pages are outputs: one run may follow another without a commit in between
IGNORED = (":!docs", ":!benchmarks/results", ":!*.md", ":!*.png")


@cache
def origin() -> dict[str, str]:
    """Return the commit of this process, and its tree: the state at the first call, which comes before the run."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = changes()
    return {"commit": commit, "tree": TREES[2] if not commit else TREES[1] if changed else TREES[0]}


def changes() -> list[str]:
    """Return the files on which figures may depend that differ from the commit, in git's short form."""
    return _git("status", "--porcelain", "--", ".", *IGNORED).splitlines()


def refuse_dirty_tree(*outputs: Path | None, small: bool = False) -> None:
    """Check, before a run, that its results may be kept.

    small: the smallest run, which keeps no results of the project (`write_results` leaves them as they are).
    Raises ConfigError if an output is a result of the project and the working tree is not a clean commit.
    """
    found = origin()
    kept = [str(path) for path in outputs if path is not None and is_kept(path)]
    if kept and not small and found["tree"] != "clean":
        reason = "\n".join(changes()) or "it is not a git repository"
        raise ConfigError(f"{kept[0]} names the commit of its run, and the tree is not a clean commit:\n{reason}")


def is_kept(path: Path) -> bool:
    """Tell whether a file or folder is one of the project's results, or their page."""
    return any(path.resolve().is_relative_to(folder) for folder in (RESULTS, FIGURES, PAGE))


def write_results(
    path: Path, document: Mapping[str, Any], *, seed: int | list[int] | None, small: bool = False
) -> None:
    """Write a document as JSON, with its run: commit, tree, seed (None: nothing is drawn) and machine.

    What the document has in `run` is kept. The smallest run does not replace results of the project.
    Raises ConfigError as `refuse_dirty_tree` does.
    """
    if small and is_kept(path):
        return
    refuse_dirty_tree(path)
    run = {**machine(), "seed": seed, **document.get("run", {}), **origin()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [json.dumps({"run": run, **_without_run(document)}, indent=1, ensure_ascii=False) + "\n"])


def machine() -> dict[str, object]:
    """Return the machine that a figure depends on."""
    found = cpu()
    return {
        "cpu": found.name,
        "cores": os.cpu_count(),
        "features": list(found.features),
        "python": platform.python_version(),
    }


def commit_of(run: Mapping[str, Any]) -> str:
    """Return the commit of a run, and the state of its tree if that was not clean, for a generated page."""
    words = {"clean": "", "dirty": " with uncommitted changes", "not recorded": " or earlier (not recorded)"}
    return f"{run['commit']}{words[run['tree']]}"


def _without_run(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "run"}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else ""

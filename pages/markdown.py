"""Tables and figures in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Format a table. `align` has a letter for each column, l or r; by default all are l."""
    marks = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def figure(value: float) -> str:
    """Format a number with at least three significant digits: 12,345; 123; 12.3; 1.23; 0.0123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Format a median with its range: `1.02 [1.00, 1.05]`; one value as it is."""
    middle = figure(statistics.median(values))
    if len(values) == 1 or min(values) == max(values):
        return middle
    return f"{middle} [{figure(min(values))}, {figure(max(values))}]"


def origin(run: Mapping[str, Any]) -> str:
    """Format where the figures of a run are from: machine, repetitions, seed, commit, and a tree that was not clean."""
    cores = f", {run['cores']} cores" if "cores" in run else ""
    repeats = f", {run['repeats']} repetitions" if "repeats" in run else ""
    seed = run.get("seed")
    if isinstance(seed, list):
        seeds = f", seeds {seed[0]} to {seed[-1]}"
    else:
        seeds = "" if seed is None else f", seed {seed}"
    tree = "" if run.get("tree", "clean") == "clean" else f" (tree: {run['tree']})"
    machine = run.get("cpu", "not recorded").replace("not recorded", "machine not recorded")
    return f"{machine}{cores}{repeats}{seeds}; commit {run['commit']}{tree}"

"""Times of placements, measured with an engine by benchmarks/sparse.py and evaluated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from papers.figure import Figure, Found, Line, Shape, mean
from papers.sparse.savings import BETA, FIXED, OPTIMAL, UNBUDGETED

BUDGETS = (1, 4, 16)
RULES = FIXED | {"optimal": OPTIMAL.replace("{beta}", str(BETA))}
PLACEMENTS = UNBUDGETED | {
    f"{label}, k = {k}": rule.format(k=k) for label, rule in RULES.items() for k in BUDGETS
}  # spelling by label
NEAR = 1.1  # times as long counts as equally good
STRAIGHT = 0.99  # R² of a linear relation


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a placement on one data set."""

    seconds: tuple[float, ...]  # of each request
    checkpoints: float  # of an entry


@dataclass(frozen=True, slots=True)
class Times:
    """Times of prompts of one length, in seconds: by tokens to recompute, and for the start of a resumption."""

    length: int
    by_tokens: Mapping[int, float]
    state: float  # loading a checkpoint
    kv: float  # gathering the prompt's KV


@dataclass(frozen=True, slots=True)
class Fit:
    """Least squares fit: seconds = intercept + slope · tokens."""

    slope: float
    intercept: float
    r2: float


def fit(tokens: Sequence[float], seconds: Sequence[float]) -> Fit:
    slope, intercept = np.polyfit(tokens, seconds, 1)
    left = np.asarray(seconds) - (slope * np.asarray(tokens) + intercept)
    around = np.asarray(seconds) - np.mean(seconds)
    return Fit(float(slope), float(intercept), float(1 - left @ left / (around @ around)))


def frontier(found: Mapping[str, Mapping[str, Measured]]) -> Found:
    """Return figure 3; `found` by data set and placement's label."""
    lines, shapes = [], []
    for name, measured in found.items():
        lines.append(Line(f"{name}: requests that were run", None, len(measured["KV only"].seconds)))
        for label, one in measured.items():
            lines.append(Line(f"{name}: {label}", None, 1000 * mean(one.seconds), "ms"))
            lines.append(Line(f"{name}: {label}, checkpoints", None, one.checkpoints, "an entry"))
        shapes += _shapes(name, measured)
    return Found(tuple(lines), tuple(shapes))


def _shapes(name: str, measured: Mapping[str, Measured]) -> list[Shape]:
    seconds = {label: mean(one.seconds) for label, one in measured.items()}
    block = measured["every block"]
    near = [
        measured[label].checkpoints
        for k in BUDGETS
        if seconds[label := f"optimal, k = {k}"] <= NEAR * seconds["every block"]
    ]
    return [
        Shape(
            f"{name}: optimal takes less time than each fixed placement, at each k",
            all(seconds[f"optimal, k = {k}"] < seconds[f"{other}, k = {k}"] for other in FIXED for k in BUDGETS),
        ),
        Shape(
            f"{name}: optimal takes at most {NEAR:g} times as long as every block, with less than half its checkpoints",
            any(count < block.checkpoints / 2 for count in near),
        ),
    ]


def proportional(times: Sequence[Times], spread: float, exact: bool) -> Found:
    """Return figure 4. `spread`: (most - least) / median of repetitions, the widest.

    `exact`: whether a resumed prefill gave the logits of a cold one.
    """
    lines, fits = [], []
    for one in times:
        found = fit(list(one.by_tokens), list(one.by_tokens.values()))
        fits.append(found)
        label = f"prompt of {one.length:,}"
        for tokens, seconds in one.by_tokens.items():
            lines.append(Line(f"{label}: {tokens:,} tokens to recompute", None, 1000 * seconds, "ms"))
        rest = found.intercept - one.state - one.kv
        for what, value, unit in (
            ("slope", 1e6 * found.slope, "ms a 1,000 tokens"),
            ("R²", found.r2, ""),
            ("intercept", 1000 * found.intercept, "ms"),
            ("of it loading the state", 1000 * one.state, "ms"),
            ("of it loading the KV", 1000 * one.kv, "ms"),
            ("of it the rest: a step's fixed work", 1000 * rest, "ms"),
        ):
            lines.append(Line(f"{label}: {what}", None, value, unit))
    lines.append(Line("widest spread of repetitions", None, 100 * spread, "%"))
    offsets = [one.intercept / max(t.by_tokens.values()) for one, t in zip(fits, times, strict=True)]
    return Found(
        tuple(lines),
        (
            Shape(
                "time is linear in the tokens to recompute: R² above 0.99 at each length",
                all(one.r2 > STRAIGHT for one in fits),
            ),
            Shape("the offset is below a tenth of the longest time", all(offset < 0.1 for offset in offsets)),
            Shape("a resumed prefill's logits are those of a cold one, bit for bit", exact),
        ),
    )


SETTING = (
    "On a CPU, one thread's CPU time (`python -m benchmarks.sparse --data ...`), random weights in bfloat16; the paper "
    "has a GPU. "
)
FRONTIER = Figure(
    name="sparse-3",
    title="Time of a layer group over the number of checkpoints",
    paper="Sparse prefix caching, figure 3",
    claim=(
        "of one attention and three DeltaNet layers of Qwen3.5-0.8B, optimal placement takes the least time of all "
        "with as many checkpoints, and as little as a checkpoint at every block with fewer."
    ),
    difference=f"{SETTING}A few requests of each data set are run, the same ones under every placement, once each. "
    "A time includes the question, or what else comes after the overlap, which no checkpoint saves.",
    run=None,
)
LINEAR = Figure(
    name="sparse-4",
    title="Time over tokens to recompute",
    paper="Sparse prefix caching, figure 4",
    claim="time is linear in the tokens to recompute, with a small offset for loading what was cached.",
    difference=f"{SETTING}State and KV lie in the memory that computes, so loading them is a copy, not a transfer; "
    "each is timed alone and over and over, so it finds the caches warm. The rest holds a step's fixed work and a bend "
    "of the line: of a long prompt the last tokens cost the most, since their attention reads all of it.",
    run=None,
)

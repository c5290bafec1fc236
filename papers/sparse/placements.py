"""Placements in the cache's tree: replayed in the lab, and timed with an engine by benchmarks/sparse.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.lab.row import Row
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from papers.figure import Found, Line, Shape, mean
from papers.lab import Lab
from papers.sparse.overlaps import DATASETS, PAGE, Dataset
from papers.sparse.savings import FEW, FIXED, RULES, UNBUDGETED

BUDGETS = (1, 4, 16, 64)
MEMORY = 8 * 10**12  # bytes: enough for a checkpoint at every block, so that only last_n evicts
POINT, TENTH = 0.01, 0.1


def replayed(lab: Lab) -> Found:
    lines: list[Line] = []
    shapes: list[Shape] = []
    for dataset in DATASETS:
        found = _rows(lab, dataset)
        for label, row in found.items():
            if label != "KV only":  # it hits nothing
                per_request = row.checkpoints_taken / row.requests
                lines.append(Line(f"{dataset.name}: {label}: hit tokens", None, 100 * row.token_hit_rate, "%"))
                lines.append(Line(f"{dataset.name}: {label}: checkpoints taken", None, per_request, "a request"))
        shapes += _replayed_shapes(dataset.name, found)
    return Found(lines, *shapes)


def _rows(lab: Lab, dataset: Dataset) -> dict[str, Row]:
    """Return rows by placement's label."""
    profile, eviction = load_profile("qwen3.5-0.8b"), f"last_n({dataset.entries})"
    rules = UNBUDGETED | {"structural": "structural"}
    rules |= {f"{label}, k = {k}": rule.format(k=k) for k in BUDGETS for label, rule in RULES.items()}
    setups = {
        label: Setup(profile, MEMORY, rule, eviction, page_size=PAGE, decode_reuse="none", tails=False)
        for label, rule in rules.items()
    }
    return lab.rows(dataset.trace(lab), setups, dataset.load)


def _replayed_shapes(name: str, found: Mapping[str, Row]) -> Sequence[Shape]:
    block = found["every block"]
    best = [found[f"optimal, k = {k}"] for k in BUDGETS]
    fixed = [max(found[f"{label}, k = {k}"].hit_tokens for label in FIXED) for k in BUDGETS]
    close = [row for row in best if row.hit_tokens >= (1 - POINT) * block.hit_tokens]
    return (
        Shape(
            f"{name}: optimal hits at least what each fixed placement hits, at each k",
            all(row.hit_tokens >= other for row, other in zip(best, fixed, strict=True)),
        ),
        Shape(
            f"{name}: optimal comes within 1% of every block's hits with less than a tenth of its checkpoints",
            any(row.checkpoints_taken < TENTH * block.checkpoints_taken for row in close),
        ),
    )


PLACEMENTS = UNBUDGETED | {  # spelling by label
    f"{label}, k = {k}": rule.format(k=k) for label, rule in RULES.items() for k in FEW
}
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
    lines: list[Line] = []
    shapes: list[Shape] = []
    for name, measured in found.items():
        lines.append(Line(f"{name}: requests that were run", None, len(measured["KV only"].seconds)))
        for label, one in measured.items():
            lines.append(Line(f"{name}: {label}", None, 1000 * mean(one.seconds), "ms"))
            lines.append(Line(f"{name}: {label}, checkpoints", None, one.checkpoints, "an entry"))
        shapes += _shapes(name, measured)
    return Found(lines, *shapes)


def _shapes(name: str, measured: Mapping[str, Measured]) -> Sequence[Shape]:
    seconds = {label: mean(one.seconds) for label, one in measured.items()}
    most, half = NEAR * seconds["every block"], measured["every block"].checkpoints / 2
    optimal = {k: f"optimal, k = {k}" for k in FEW}
    return (
        Shape(
            f"{name}: optimal takes less time than each fixed placement, at each k",
            all(seconds[optimal[k]] < seconds[f"{other}, k = {k}"] for other in FIXED for k in FEW),
        ),
        Shape(
            f"{name}: optimal takes at most {NEAR:g} times as long as every block, with less than half its checkpoints",
            any(seconds[label] <= most and measured[label].checkpoints < half for label in optimal.values()),
        ),
    )


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
        lines,
        Shape(
            "time is linear in the tokens to recompute: R² above 0.99 at each length",
            all(one.r2 > STRAIGHT for one in fits),
        ),
        Shape("the offset is below a tenth of the longest time", all(offset < 0.1 for offset in offsets)),
        Shape("a resumed prefill's logits are those of a cold one, bit for bit", exact),
    )

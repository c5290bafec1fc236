"""What composing costs in answers: `headwater eval --segments`, read from the file that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from papers.figure import Figure, Found, Line, Shape

WHOLE, PREFIX, NAIVE, BALANCED = "whole", "prefixes", "naive", "balanced"
NAMES = {
    WHOLE: "full recompute",
    PREFIX: "prefix cache",
    NAIVE: "naive addition",
    "w0": "w = 0",
    "w4": "w = 4",
    "fast": "fast (w = 8)",
    "w16": "w = 16",
    "w32": "w = 32",
    BALANCED: "balanced",
    "high": "high",
}
KINDS = {"single": "one hop", "two_hop": "two hops", "absent": "not there"}
PAPER = {NAIVE: -25.3, "fast": -3.34}  # points lost on average of models and tasks
WITHIN = 1.0  # point of full recompute


def quality(evaluation: Mapping[str, Any]) -> Found:
    """`evaluation`: what `headwater eval --segments --json` wrote."""
    columns, comparisons = evaluation["columns"], evaluation["comparisons"]
    whole = columns[WHOLE]["all"][0]
    lines = [
        Line("questions", None, whole["items"]),
        Line(f"{NAMES[WHOLE]}: right", None, 100 * whole["exact"]["mean"], _interval(whole["exact"])),
        *(_by_kind(WHOLE, columns[WHOLE])),
    ]
    lost = {}
    for way, name in NAMES.items():
        if way == WHOLE:
            continue
        found, difference = columns[way]["all"][0], comparisons[way]["difference"]
        lost[way] = 100 * difference["mean"]
        cached = 100 * found["cached_tokens"] / found["prompt_tokens"]
        lines += [
            Line(f"{name}: less {NAMES[WHOLE]}", PAPER.get(way), lost[way], _interval(difference)),
            Line(f"{name}: prompt tokens not computed", None, cached, "%"),
            *_by_kind(way, columns[way]),
        ]
    return Found(
        tuple(lines),
        (
            Shape("a prefix cache changes no answer", comparisons[PREFIX]["equal"] == comparisons[PREFIX]["items"]),
            Shape(f"balanced is within {WITHIN:g} point of full recompute", lost[BALANCED] >= -WITHIN),
            Shape(
                "naive addition is clearly worse: its interval ends below balanced's loss",
                100 * comparisons[NAIVE]["difference"]["high"] < lost[BALANCED],
            ),
            Shape("wider seams lose less: w = 0, 8, 32", lost["w0"] <= lost["fast"] <= lost["w32"]),
        ),
    )


def _by_kind(way: str, column: Mapping[str, Any]) -> list[Line]:
    rows = {row["value"]: row["exact"] for row in column["kind"]}
    return [
        Line(f"{NAMES[way]}: {name}", None, 100 * rows[kind]["mean"], _interval(rows[kind]))
        for kind, name in KINDS.items()
        if kind in rows
    ]


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None:
        return "%"
    return f"% [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


FIGURE = Figure(
    name="hypic-10",
    title="Right answers of composed prompts, by way of composing",
    paper="HYPIC, figures 10 and 13",
    claim="8 tokens at each end of a segment lose 1.36 points on Qwen3.5, 5.31 on Ring, 3.34 on average; naive "
    "addition 25.3.",
    difference=(
        "The embedded model on held-out questions about 4 to 48 documents (`python -m benchmarks.segment_quality`), "
        "the documents in another order in each prompt of a group; the paper has F1 and ROUGE-L of models of 16B to "
        "122B. "
        "Of tokens not computed the segments that a group's first question has made are left out; the paper warms all. "
        "This model was trained with segments computed apart, as those models were not: without that it lost far more "
        "(docs/decisions/025-training-on-independent-segments.md)."
    ),
    run=None,
)

"""HYPIC's figures of an engine that composes segments.

benchmarks/segments.py measures times to the first token, benchmarks/segment_quality.py answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from papers.figure import Figure, Found, Line, Shape, quantile

RECOMPUTE, PREFIX, HYPIC = "full recompute", "prefix cache", "segments, w = 8"
SPEEDUP, SHARE = 4.9, 0.06  # at the longest prompt; of a segment's prefill, what one more warm segment may cost
PAPER_SPEEDUPS = {(4, 1024): 1.37, (4, 4096): 4.91, (16, 1024): 4.80}  # by segments and their tokens


@dataclass(frozen=True, slots=True)
class Ttft:
    """Seconds to the first token by method and repetition, of prompts of `segments` segments; methods take turns."""

    segments: int
    tokens: int  # of each
    seconds: Mapping[str, Sequence[float]]

    @property
    def name(self) -> str:
        return f"{self.segments} segments of {self.tokens:,}"

    def ratios(self, above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True)]

    def median(self, way: str) -> float:
        return median(self.seconds[way])


def alone(found: Sequence[Ttft]) -> Found:
    """Return figure 12: by tokens of a segment, and by number of segments."""
    lines = [line for one in found for line in _ttft_lines(one)]
    by_number = sorted((one for one in found if one.tokens == found[0].tokens), key=lambda one: one.segments)
    first, last = by_number[0], by_number[-1]
    prefill, warm = (
        (last.median(way) - first.median(way)) / (last.segments - first.segments) for way in (RECOMPUTE, HYPIC)
    )
    lines += [
        Line("one more segment, full recompute", 40.7, 1000 * prefill, "ms"),
        Line("one more warm segment", 2.3, 1000 * warm, "ms"),
        Line("one more warm segment, of its prefill", 100 * 2.3 / 40.7, 100 * warm / prefill, "%"),
    ]
    longest = max(found, key=lambda one: (one.segments * one.tokens, one.tokens))
    speedups = [median(one.ratios(RECOMPUTE, HYPIC)) for one in found if one.segments == first.segments]
    return Found(
        tuple(lines),
        (
            Shape(f"at least {SPEEDUP:g}x at {longest.name}", median(longest.ratios(RECOMPUTE, HYPIC)) >= SPEEDUP),
            Shape(f"one more warm segment costs at most {SHARE:.0%} of its prefill", warm <= SHARE * prefill),
            Shape("the longer the segments the larger the ratio", speedups == sorted(speedups)),
        ),
    )


def _ttft_lines(one: Ttft) -> list[Line]:
    lines = [Line(f"{one.name}: {way}", None, 1000 * one.median(way), "ms") for way in one.seconds]
    for above in (RECOMPUTE, PREFIX):
        paper = PAPER_SPEEDUPS.get((one.segments, one.tokens)) if above == RECOMPUTE else None
        ratios = one.ratios(above, HYPIC)
        lines.append(Line(f"{one.name}: {above} over {HYPIC}", paper, median(ratios), "x"))
        lines.append(Line(f"{one.name}: of repetitions, least", None, min(ratios), f"to {max(ratios):.2f} x"))
    return lines


@dataclass(frozen=True, slots=True)
class Loaded:
    """One run under load."""

    ttft: Sequence[float]  # seconds, of each request
    seconds: float  # of all
    prompt_tokens: int

    @property
    def rate(self) -> float:
        return len(self.ttft) / self.seconds


def under_load(runs: Mapping[str, Sequence[Loaded]]) -> Found:
    """Return figure 11 by method; run i of each method has the same documents."""
    lines = []
    for way, of_way in runs.items():
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            value = median(quantile(run.ttft, share) for run in of_way)
            lines.append(Line(f"{way}: {label} of TTFT", None, 1000 * value, "ms"))
        tokens = median(run.prompt_tokens / run.seconds for run in of_way)
        lines.append(Line(f"{way}: requests", None, median(run.rate for run in of_way), "a second"))
        lines.append(Line(f"{way}: prompt tokens", None, tokens, "a second"))
    more = [theirs.rate / ours.rate for theirs, ours in zip(runs[HYPIC], runs[PREFIX], strict=True)]
    lines.append(Line(f"requests a second, {HYPIC} over {PREFIX}", None, median(more), "x"))
    lines.append(Line("of runs, least", None, min(more), f"to {max(more):.2f} x"))
    return Found(tuple(lines), (Shape("segments serve more requests a second in every run", min(more) > 1),))


SETTING = (
    "On a CPU (`python -m benchmarks.segments`), random weights in float32: hidden size 512, six Gated DeltaNet and "
    "two attention layers; the paper has GPUs and models of 16B to 122B. "
)
FIG_12 = Figure(
    name="hypic-12",
    title="Time to the first token over tokens and number of segments",
    paper="HYPIC, figure 12",
    claim="4 segments: 1.37x at 4k tokens to 4.91x at 16k; 1k tokens each: up to 4.80x at 16 segments, 2.3 ms for one "
    "more segment against 40.7.",
    difference=f"{SETTING}All segments are warm, the first document is another one in every prompt, so the prefix "
    "cache finds the leading part alone.",
    run=None,
)
FIG_11 = Figure(
    name="hypic-11",
    title="RAG under load, documents by Zipf",
    paper="HYPIC, figure 11",
    claim="at 1 s of TTFT 1.28 to 2.83 times the requests of a prefix cache, and 1.24 to 2.11 times its throughput.",
    difference=f"{SETTING}8 clients that ask one after the other, not arrivals at a rate, and synthetic documents: the "
    "paper's trace is not public. Nothing is warm at the beginning.",
    run=None,
)


WHOLE, PREFIXES, NAIVE, BALANCED = "whole", "prefixes", "naive", "balanced"
NAMES = {
    WHOLE: "full recompute",
    PREFIXES: "prefix cache",
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
PAPER_LOST = {NAIVE: -25.3, "fast": -3.34}  # points lost, average over models and tasks
WITHIN = 1.0  # point of full recompute


def quality(evaluation: Mapping[str, Any]) -> Found:
    """Return figures 10 and 13 from the document of `headwater eval --segments --json`."""
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
            Line(f"{name}: less {NAMES[WHOLE]}", PAPER_LOST.get(way), lost[way], _interval(difference)),
            Line(f"{name}: prompt tokens not computed", None, cached, "%"),
            *_by_kind(way, columns[way]),
        ]
    return Found(
        tuple(lines),
        (
            Shape("a prefix cache changes no answer", comparisons[PREFIXES]["equal"] == comparisons[PREFIXES]["items"]),
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


FIG_10 = Figure(
    name="hypic-10",
    title="Right answers of composed prompts, by way of composing",
    paper="HYPIC, figures 10 and 13",
    claim="8 tokens at each end of a segment lose 1.36 points on Qwen3.5, 5.31 on Ring, 3.34 on average; naive "
    "addition 25.3.",
    difference=(
        "The embedded model on held-out questions about 4 to 48 documents (`python -m benchmarks.segment_quality`), "
        "the documents in another order in each prompt of a group; the paper has F1 and ROUGE-L of models of 16B to "
        "122B. "
        "Segments that are built for the first question of a group do not count as saved tokens; the paper stores all "
        "segments in advance. This model was trained on independent segments, unlike the paper's models: without this "
        "training it lost far more (docs/decisions/025-training-on-independent-segments.md)."
    ),
    run=None,
)

"""HYPIC's figures that benchmarks measure with an engine or with a model.

`benchmarks/segment_states.py` measures states, `segments.py` times to first token, `segment_quality.py` answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from statistics import median
from typing import Any

from headwater.lab.fidelity.figures import Deviation, Distance
from papers.figure import Found, Line, Shape, quantile

LAYER_TOKENS, SEGMENTS = 1096, 4
BOUND = 1e-5  # relative error of float32
DECAYS, LENGTHS = (5, 7, 10), (256, 512, 1024)  # γ = 1 − 2^(−n); tokens of the segment after
ERRORS = ((1.000, 1.000, 1.000), (0.866, 0.982, 1.000), (0.221, 0.394, 0.632))  # in the paper, by decay and length
PAPER_ADDITION = dict(zip(product(DECAYS, LENGTHS), chain(*ERRORS), strict=True))


def first_layer(found: Mapping[str, Distance], rounded: Mapping[str, Distance]) -> Found:
    """Return the first layer's errors by kind of mixer; `rounded`: with transitions in bfloat16."""
    lines = []
    for name, drift in found.items():
        lines += [
            Line(f"{name}: relative error", 6e-5, drift.error),
            Line(f"{name}: angle", 0.003, drift.degrees, "°"),
            Line(f"{name}: relative error with transitions in bfloat16", None, rounded[name].error),
        ]
    worst = max(drift.error for drift in found.values())
    return Found(lines, Shape(f"every mixer's composed state equals the full state within {BOUND:g}", worst <= BOUND))


def addition(found: Mapping[tuple[int, int], float]) -> Found:
    """Return the errors of naive addition by n of γ = 1 − 2^(−n) and tokens."""
    table = PAPER_ADDITION.items()
    lines = tuple(Line(f"γ = 1 - 2^-{n}, {tokens:,} tokens", paper, found[n, tokens]) for (n, tokens), paper in table)
    return Found(lines, Shape("every error equals the table's", all(round(found[x], 3) == paper for x, paper in table)))


TOKENS, PARTS = 512, 2
TRAINED = "headwater-tiny"
QWEN, RING = (8.92, 5.11), (8.69, 4.98)  # percent and degrees of the paper's two models
ENVELOPE = 0.10  # "within a 10% state-drift envelope" (section 6.3)


def deepest(skipped: Mapping[str, Distance], within: Mapping[str, Distance]) -> Found:
    """Return table 4 by model: with attention layers that add nothing, and with attention."""
    lines = []
    for found, where, in_paper in ((skipped, "attention skipped", True), (within, "attention in", False)):
        for name, drift in found.items():
            paper = (RING if "Ring" in name else QWEN) if in_paper else (None, None)
            lines += [
                Line(f"{name}, {where}: relative L2", paper[0], 100 * drift.error, "%"),
                Line(f"{name}, {where}: angle", paper[1], drift.degrees, "°"),
            ]
    small = skipped[TRAINED].error <= ENVELOPE
    return Found(lines, Shape(f"the trained model stays within {ENVELOPE:.0%} with attention skipped", small))


def boundaries(found: Mapping[str, Deviation]) -> Found:
    """Return figure 3 by attention layer of the trained model."""
    lines = []
    for name, places in found.items():
        lines += [
            Line(f"{name}: head over interior", None, places.head / places.interior, "x"),
            Line(f"{name}: tail over interior", None, places.tail / places.interior, "x"),
        ]
    return Found(
        lines,
        Shape(
            "attention deviates more at heads of segments than in interiors",
            all(p.head > p.interior for p in found.values()),
        ),
        Shape(
            "attention deviates more at tails of segments than in interiors",
            all(p.tail > p.interior for p in found.values()),
        ),
    )


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
        lines,
        Shape(f"at least {SPEEDUP:g}x at {longest.name}", median(longest.ratios(RECOMPUTE, HYPIC)) >= SPEEDUP),
        Shape(f"one more warm segment costs at most {SHARE:.0%} of its prefill", warm <= SHARE * prefill),
        Shape("the longer the segments the larger the ratio", speedups == sorted(speedups)),
    )


def _ttft_lines(one: Ttft) -> list[Line]:
    lines = [Line(f"{one.name}: {way}", None, 1000 * one.median(way), "ms") for way in one.seconds]
    for above in (RECOMPUTE, PREFIX):
        paper = PAPER_SPEEDUPS.get((one.segments, one.tokens)) if above == RECOMPUTE else None
        ratios = one.ratios(above, HYPIC)
        lines.append(Line(f"{one.name}: {above} over {HYPIC}", paper, median(ratios), "x"))
        lines.append(Line(f"{one.name}: smallest ratio of a repetition", None, min(ratios), f"to {max(ratios):.2f} x"))
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
    lines.append(Line("smallest ratio of a run", None, min(more), f"to {max(more):.2f} x"))
    return Found(lines, Shape("segments serve more requests a second in every run", min(more) > 1))


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
KINDS = {"single": "one hop", "two_hop": "two hops", "absent": "no answer in the documents"}
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
            Line(f"{name}: minus {NAMES[WHOLE]}", PAPER_LOST.get(way), lost[way], _interval(difference)),
            Line(f"{name}: prompt tokens not computed", None, cached, "%"),
            *_by_kind(way, columns[way]),
        ]
    return Found(
        lines,
        Shape("a prefix cache changes no answer", comparisons[PREFIXES]["equal"] == comparisons[PREFIXES]["items"]),
        Shape(f"balanced is within {WITHIN:g} point of full recompute", lost[BALANCED] >= -WITHIN),
        Shape(
            "naive addition is clearly worse: its interval ends below balanced's loss",
            100 * comparisons[NAIVE]["difference"]["high"] < lost[BALANCED],
        ),
        Shape("wider seams lose less: w = 0, 8, 32", lost["w0"] <= lost["fast"] <= lost["w32"]),
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

"""One trace under Marconi and SGLang+, request by request."""

from __future__ import annotations

from itertools import pairwise

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.ttft import cost, ttfts
from papers.marconi.workloads import AGENTS, Cell, cells
from papers.quantile import mean, quantile, ratio

SYSTEMS = ("sglang+", "marconi")
PAPER_RATE = 16.4  # SGLang+'s hit rate, in percent, on the paper's trace
EDGES = (0, 3_500, 7_000, 10_500, 14_000, 21_000, 28_000, 1_000_000)
SHORT = 7_000
PAPER_TTFT = {0.05: -6.3, 0.5: 13.4, 0.95: 22.0}


def cell(lab: Lab) -> Cell:
    """The memory size whose hit rate under SGLang+ is nearest to the paper's."""
    return min(cells(lab, AGENTS, SYSTEMS), key=lambda one: abs(one.hit_rate("sglang+") - PAPER_RATE))


def by_length(lab: Lab) -> Found:
    found = cell(lab)
    bins = {pair: gain for pair in pairwise(EDGES) if (gain := _gain(found, *pair)) is not None}
    flops = {system: found.results[system].row.flops_saved for system in SYSTEMS}
    short = [gain for (_, end), gain in bins.items() if end <= SHORT]
    long = [gain for (_, end), gain in bins.items() if end > SHORT]
    lines = [
        Line(f"token hit rate, SGLang+, {found.memory:g} GB", PAPER_RATE, found.hit_rate("sglang+"), "%"),
        Line(f"token hit rate, Marconi, {found.memory:g} GB", 32.7, found.hit_rate("marconi"), "%"),
        Line("FLOPs saved, over SGLang+", 90.3, 100 * (ratio(flops["marconi"], flops["sglang+"]) - 1), "%"),
        Line("below 7K tokens, the worst bin", -3.0, quantile(short, 0), "points"),
        Line("from 7K tokens on, the best bin", 25.5, quantile(long, 1), "points"),
    ]
    lines += [Line(f"{begin:,} to {end:,} tokens", None, gain, "points") for (begin, end), gain in bins.items()]
    return Found(
        tuple(lines),
        (
            Shape("Marconi hits less of the short requests", mean(short) < 0),
            Shape("and more of those from 7K tokens on", mean(long) > 0),
            Shape("it saves more FLOPs", flops["marconi"] > flops["sglang+"]),
        ),
    )


def _gain(found: Cell, begin: int, end: int) -> float | None:
    """Points of hit rate, on average over the requests of such a length; None: there are none."""
    rates = []
    for system in SYSTEMS:
        requests = [one for one in found.results[system].outcomes if begin <= one.prompt_tokens < end]
        if not requests:
            return None
        rates.append(mean([100 * one.resumed_at / one.prompt_tokens for one in requests]))
    return rates[1] - rates[0]


def times(lab: Lab) -> Found:
    found, model = cell(lab), cost()
    lines, less = [], {}
    for share, percent in PAPER_TTFT.items():
        lru, marconi = (quantile(ttfts(model, found.results[system].outcomes), share) for system in SYSTEMS)
        less[share] = 100 * (1 - marconi / lru)
        name = f"P{100 * share:.0f}"
        lines += [
            Line(f"{name}, SGLang+", None, lru, "ms"),
            Line(f"{name}, Marconi", None, marconi, "ms"),
            Line(f"{name}, less than SGLang+", percent, less[share], "%"),
        ]
    return Found(
        tuple(lines),
        (
            Shape("Marconi is not faster at P5", less[0.05] <= 0),
            Shape("but at P50", less[0.5] > 0),
            Shape("and at P95", less[0.95] > 0),
        ),
    )


BY_LENGTH = Figure(
    name="marconi-10a",
    title="Hit rate over the prompt's length, Marconi less SGLang+",
    paper="Marconi, figure 10a and section 5.3",
    claim="FLOP-aware eviction gives up some hits of short requests for more of long ones.",
    difference=(
        "On this trace Marconi trades hits of short requests for hits of long ones as in the paper, but the point"
        " from which it gains lies higher, and it gains too little there to win overall (why: marconi-8)."
    ),
    run=by_length,
)
TIMES = Figure(
    name="marconi-10b",
    title="TTFT of all requests of that trace",
    paper="Marconi, figure 10b and section 5.3",
    claim="P5 is 6.3% worse than under SGLang+, P50 and P95 are 13.4% and 22.0% better.",
    difference=(
        "As the hits: what short requests lose and the longest gain is small, and most of the requests lie below "
        "the point from which Marconi gains."
    ),
    run=times,
)

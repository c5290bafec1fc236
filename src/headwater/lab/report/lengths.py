"""Hit rate by prompt length, memory by memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headwater.lab.report.chart import Axis, frame, linear, marks, path, paths, place, round_up
from headwater.lab.report.line import Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import count, percent, size, tokens
from headwater.lab.report.section import by_memory, empty, figures, panel, panels, section
from headwater.lab.row import Result
from headwater.lab.tally import Outcome

BINS = 12  # at most
ABOUT = "each point: prompts of that length; grey: their share of all prompt tokens; dashed: the ideal"


@dataclass(slots=True)
class Bin:
    """Sums over prompts of about one length."""

    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0


def by_length(results: Sequence[Result], lines: Lines) -> Markup:
    ran = [result for result in results if result.row.prompt_tokens]
    title = "Hit rate by prompt length"
    if not ran:
        return section("length", title, "", empty("No request was replayed."))
    edges = _edges(ran)
    binned = [_bins(result.outcomes, edges) for result in ran]
    known = {id(result): bins for result, bins in zip(ran, binned, strict=True)}
    names = [f"{tokens(low)}–{tokens(high)}" for low, high in pairwise(edges)]
    top = max(bin.ideal_tokens / bin.prompt_tokens for bins in binned for bin in bins if bin.prompt_tokens)
    most = max(top, max(bin.hit_tokens / bin.prompt_tokens for bins in binned for bin in bins if bin.prompt_tokens))
    y = linear(round_up(most), lambda share: percent(share, 0))
    drawn = [
        panel(memory, _figure([(result, known[id(result)]) for result in group], lines, names, edges, y))
        for memory, group in by_memory(ran)
    ]
    rows = [[lines.title(result.row), *map(_rate, bins)] for result, bins in zip(ran, binned, strict=True)]
    head = ["Prompt tokens", *names]
    prompts = ["Prompts", *(count(bin.prompts) for bin in binned[0])]
    data = figures(head, [prompts, *rows])
    return section("length", title, ABOUT, lines.legend("Lines that are drawn"), panels(drawn), data)


def _edges(results: Sequence[Result]) -> list[int]:
    """Ends of the bins: powers of two, or fractions of them, from the shortest prompt to the longest."""
    lengths = [one.prompt_tokens for one in results[0].outcomes if one.prompt_tokens]
    low, high = min(lengths), max(lengths) + 1
    octaves = math.log2(high / low)
    step = next((step for step in (0.25, 0.5, 1, 2) if octaves / step <= BINS - 2), 4)
    first, last = math.floor(math.log2(low) / step), math.ceil(math.log2(high) / step)
    return sorted({round(2 ** (step * i)) for i in range(first, max(first + 1, last) + 1)})


def _bins(outcomes: Sequence[Outcome], edges: Sequence[int]) -> list[Bin]:
    bins = [Bin() for _ in edges[1:]]
    for one in outcomes:
        bin = bins[min(len(bins), max(1, bisect_right(edges, one.prompt_tokens))) - 1]
        bin.prompts += 1
        bin.prompt_tokens += one.prompt_tokens
        bin.hit_tokens += one.hit_tokens
        bin.ideal_tokens += one.ideal
    return bins


def _figure(
    group: Sequence[tuple[Result, list[Bin]]], lines: Lines, names: Sequence[str], edges: Sequence[int], y: Axis
) -> Markup:
    n = len(names)
    x = Axis(lambda bin: (bin + 0.5) / n, tuple((i / n, tokens(edges[i])) for i in range(0, n + 1, 1 + n // 6)))
    first = group[0][1]
    all_tokens = sum(bin.prompt_tokens for bin in first)
    shares = [bin.prompt_tokens / all_tokens for bin in first]
    weights = [
        tag("rect", x=place(i / n + 0.1 / n), width=place(0.8 / n), y=place(1 - share), height=place(share))
        for i, share in enumerate(shares)
    ]
    ideal = [(x.at(i), y.at(bin.ideal_tokens / bin.prompt_tokens)) for i, bin in enumerate(first) if bin.prompt_tokens]
    drawn, over = [path(ideal, "ideal")], []
    for result, bins in group:
        line = lines.of(result.row)
        points = [
            ((x.at(i), y.at(bin.hit_tokens / bin.prompt_tokens)), _tip(lines.title(result.row), names[i], bin))
            for i, bin in enumerate(bins)
            if bin.prompt_tokens
        ]
        drawn.append(path([point for point, _ in points], line.look))
        over.append(marks(line, points))
    label = f"Hit rate by prompt length with {size(group[0][0].row.memory)}"
    return frame(label, x, y, tag("g", weights, class_="weights"), paths(*drawn), *over)


def _rate(bin: Bin) -> str:
    return percent(bin.hit_tokens / bin.prompt_tokens) if bin.prompt_tokens else "–"


def _tip(title: str, name: str, bin: Bin) -> str:
    ideal = percent(bin.ideal_tokens / bin.prompt_tokens)
    return f"{title}\n{name} tokens: hit rate {_rate(bin)}, ideal {ideal}\n{count(bin.prompts)} prompts"

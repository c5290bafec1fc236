"""Curves of the report: hit rate over memory and by prompt length, and times to the first token."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headwater.chart import (
    Axis,
    Chart,
    Group,
    Point,
    decades,
    linear,
    logarithmic,
    marks,
    path,
    place,
    rect,
    round_up,
    spots,
)
from headwater.lab.report.lines import Line, Lines, by_memory, count, duration, milliseconds, percent, size, tokens
from headwater.lab.row import Result, Row
from headwater.lab.tally import Outcome
from headwater.percentile import percentile

BINS = 12  # most bins of prompt lengths
PERCENTS = (1, *range(5, 100, 5), 99, 100)
FLOOR = 0.01  # milliseconds: shorter times are drawn there


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar with its name and its value. `at` are places along it, as percentages."""

    name: str
    value: str
    look: str
    label: str
    tip: str
    at: Sequence[str]


# -- over memory ---------------------------------------------------------------


def memory_chart(results: Sequence[Result], lines: Lines) -> Chart:
    """Draw a line for each combination of policies, and the ideal."""
    rows = sorted((result.row for result in results), key=lambda row: row.memory)
    memories = sorted({row.memory for row in rows})
    ends = [memories[0] / 1.06, memories[-1] * 1.06]  # so that no mark lies on the figure's edge
    x, y = logarithmic(ends, memories, size), _hit_rates(rows)
    points: dict[Line, list[tuple[Point, str]]] = defaultdict(list)
    for row in rows:
        points[lines.of(row)].append(((x.at(row.memory), y.at(row.token_hit_rate)), _memory_tip(row, lines)))
    ideal = [max(row.ideal_hit_rate for row in rows if row.memory == memory) for memory in memories]
    bound = [(x.at(memory), y.at(rate)) for memory, rate in zip(memories, ideal, strict=True)]
    edges = [(0.0, bound[0][1]), *bound, (1.0, bound[-1][1])]
    drawn = [path([point for point, _ in told], line.look) for line, told in points.items()]
    over = [Group(marks(line.mark, told), line.look) for line, told in points.items()]
    label = f"Hit rate over memory from {size(memories[0])} to {size(memories[-1])}; the rows have the same figures"
    return Chart(label, x, y, [Group([path(edges, "ideal"), *drawn], stretched=True), *over], kind="tall")


def memory_bars(results: Sequence[Result], lines: Lines) -> list[Bar]:
    """Draw a bar for each row, with the ideal as its second place; the rows have the same memory."""
    rows = [result.row for result in results]
    y = _hit_rates(rows)
    return [
        Bar(
            name=lines.of(row).name,
            value=percent(row.token_hit_rate),
            look=lines.of(row).colour,
            label=f"{lines.of(row).name}: {percent(row.token_hit_rate, 2)}",
            tip=_memory_tip(row, lines),
            at=[place(max(0.0, y.at(row.token_hit_rate))), place(y.at(row.ideal_hit_rate))],
        )
        for row in rows
    ]


def _hit_rates(rows: Sequence[Row]) -> Axis:
    def write(value: float) -> str:
        return percent(value, 0 if round(100 * value, 6).is_integer() else 1)

    return linear(round_up(max(max(row.ideal_hit_rate, row.token_hit_rate) for row in rows)), write)


def _memory_tip(row: Row, lines: Lines) -> str:
    of_ideal = f", {percent(row.token_hit_rate / row.ideal_hit_rate)} of the ideal" if row.ideal_hit_rate else ""
    saved = f"FLOPs saved {percent(row.flops_saved_share, 2)}"
    return f"{lines.title(row)}\nhit rate {percent(row.token_hit_rate, 2)}{of_ideal}\n{saved}"


# -- by prompt length ----------------------------------------------------------


@dataclass(slots=True)
class Bin:
    """Sums over prompts of similar length."""

    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def ideal(self) -> float:
        return self.ideal_tokens / self.prompt_tokens


class Lengths:
    """Hit rates by prompt length: a chart for each memory size, and the figures of all rows."""

    def __init__(self, results: Sequence[Result], lines: Lines) -> None:
        self._lines, self._edges = lines, _edges(results[0].outcomes)
        self._names = [f"{tokens(low)}–{tokens(high)}" for low, high in pairwise(self._edges)]
        self._binned = [(result, _bins(result.outcomes, self._edges)) for result in results]

    def charts(self) -> list[tuple[str, Chart]]:
        filled = [bin for _, bins in self._binned for bin in bins if bin.prompt_tokens]
        y = linear(round_up(max(max(bin.ideal, bin.hit_rate) for bin in filled)), lambda share: percent(share, 0))
        return [(memory, self._chart(group, y)) for memory, group in by_memory(self._binned)]

    def figures(self) -> list[list[str]]:
        """Return the head, the number of prompts, and each row's hit rates."""
        rows = [
            [self._lines.title(result.row), *(percent(bin.hit_rate) if bin.prompt_tokens else "–" for bin in bins)]
            for result, bins in self._binned
        ]
        prompts = [count(bin.prompts) for bin in self._binned[0][1]]
        return [["Prompt tokens", *self._names], ["Prompts", *prompts], *rows]

    def _chart(self, group: Sequence[tuple[Result, list[Bin]]], y: Axis) -> Chart:
        n, (first, bins) = len(self._names), group[0]
        ticks = tuple((i / n, tokens(self._edges[i])) for i in range(0, n + 1, 1 + n // 6))
        x = Axis(lambda bin: (bin + 0.5) / n, ticks)
        weights = [
            rect((i + 0.1) / n, 0.8 / n, bin.prompt_tokens / first.row.prompt_tokens) for i, bin in enumerate(bins)
        ]
        drawn = [path([(x.at(i), y.at(bin.ideal)) for i, bin in enumerate(bins) if bin.prompt_tokens], "ideal")]
        over = []
        for result, bins in group:
            line = self._lines.of(result.row)
            points = [
                ((x.at(i), y.at(bin.hit_rate)), self._tip(result.row, name, bin))
                for i, (name, bin) in enumerate(zip(self._names, bins, strict=True))
                if bin.prompt_tokens
            ]
            drawn.append(path([point for point, _ in points], line.look))
            over.append(Group(marks(line.mark, points), line.look))
        label = f"Hit rate by prompt length with {size(first.row.memory)}"
        return Chart(label, x, y, [Group(weights, "weights"), Group(drawn, stretched=True), *over])

    def _tip(self, row: Row, name: str, bin: Bin) -> str:
        rates = f"hit rate {percent(bin.hit_rate)}, ideal {percent(bin.ideal)}"
        return f"{self._lines.title(row)}\n{name} tokens: {rates}\n{count(bin.prompts)} prompts"


def _edges(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the ends of the bins: powers of two, or fractions of them, from the shortest prompt to the longest."""
    lengths = [one.prompt_tokens for one in outcomes if one.prompt_tokens]
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


# -- times to the first token --------------------------------------------------


class Times:
    """Times to the first token: a bar for each row, and their distributions for each memory size."""

    def __init__(self, results: Iterable[Result], lines: Lines) -> None:
        self._lines = lines
        self._timed = [(result, times) for result in results if (times := _times(result))]
        self.scale = _scale([times for _, times in self._timed])

    def bars(self) -> list[Bar]:
        """Return bars from p5 to p95, with places of p5, their width, p50, p95 and p99."""
        return [self._bar(result.row) for result, _ in self._timed]

    def _bar(self, row: Row) -> Bar:
        spread, title = row.ttft_ms, self._lines.title(row)
        assert spread is not None, "a row whose requests have times has their spread"
        told = {name: getattr(spread, name) for name in ("p5", "p50", "p95", "p99", "mean")}
        words = ", ".join(f"{name} {milliseconds(value)}" for name, value in told.items())
        p5, p50, p95, p99, _ = (self.scale.at(max(FLOOR, value)) for value in told.values())
        at = [place(share) for share in (p5, max(0.002, p95 - p5), p50, p95, p99)]
        look = self._lines.of(row).colour
        return Bar(title, milliseconds(spread.p50), look, f"{title}: {words}", f"{title}\n{words}", at)

    def charts(self) -> list[tuple[str, Chart]]:
        return [(memory, self._chart(memory, group)) for memory, group in by_memory(self._timed)]

    def _chart(self, memory: str, timed: Sequence[tuple[Result, list[float]]]) -> Chart:
        x, y = _scale([times for _, times in timed]), linear(1.0, lambda share: percent(share, 0))
        drawn, over = [], []
        for result, times in timed:
            line = self._lines.of(result.row)
            values = [(rank, percentile(times, rank)) for rank in PERCENTS]
            told = [
                ((x.at(value), y.at(rank / 100)), f"{line.name}, {memory}\n{rank}% within {milliseconds(value)}")
                for rank, value in values
            ]
            drawn.append(path([point for point, _ in told], line.look))
            over += [Group(marks(line.mark, told[2:-1:4]), line.look), Group(spots(told), line.look)]
        groups = [Group(drawn, stretched=True), *over]
        return Chart(f"Distribution of times to the first token with {memory}", x, y, groups)


def _times(result: Result) -> list[float]:
    """Return milliseconds in ascending order."""
    return sorted(max(FLOOR, 1000 * one.ttft) for one in result.outcomes if one.ttft is not None)


def _scale(times: Sequence[Sequence[float]]) -> Axis:
    low, high = min(one[0] for one in times), max(one[-1] for one in times)
    ends = [low, max(high, low * 1.5)]
    return logarithmic(ends, decades(*ends), duration)

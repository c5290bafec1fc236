"""Times to the first token: a bar for each row, and their distributions for each memory size."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.chart import Axis, Chart, Group, Shape, decades, linear, logarithmic, marks, path, place, spots
from headwater.lab.report.blocks import (
    SHOWN,
    Empty,
    Heading,
    Keys,
    Legend,
    Lines,
    Panels,
    Section,
    Strip,
    Strips,
    by_memory,
)
from headwater.lab.report.numbers import duration, milliseconds, percent
from headwater.lab.row import Result
from headwater.percentile import percentile

PERCENTS = (1, *range(5, 100, 5), 99, 100)
FLOOR = 0.01  # milliseconds: shorter times are drawn there
LEGEND = Legend((("i", "whisker", "", "p5 to p95"), ("i", "median", "", "p50"), ("i", "dot", "", "p99")))
ABOUT = "milliseconds from a request's arrival to its first token, on a logarithmic scale"


def latency(results: Sequence[Result], lines: Lines) -> Section:
    """Return bars and distributions; a sentence if no row has times."""
    timed = [(result, times) for result in results if (times := _times(result))]
    title = "Time to the first token"
    if not timed:
        words = "Nothing took time: the requests were replayed one by one (--serve DEVICE gives them a clock)."
        return Section("ttft", title, "", [Empty(words)])
    x = _scale(timed)
    strips = [_strip(result, lines, x) for result, _ in timed if result.row.ttft_ms is not None]
    known = {id(result): times for result, times in timed}
    curves = [
        (memory, _curves([(result, known[id(result)]) for result in group], lines, memory))
        for memory, group in by_memory([result for result, _ in timed])
    ]
    blocks = [
        *(LEGEND, Strips([*strips, _foot(x)], "ttft")),
        *(Heading("Share of requests with their first token by then"), Keys(lines.all, SHOWN), Panels(curves)),
    ]
    return Section("ttft", title, ABOUT, blocks)


def _times(result: Result) -> list[float]:
    """Return milliseconds in ascending order."""
    return sorted(max(FLOOR, 1000 * one.ttft) for one in result.outcomes if one.ttft is not None)


def _scale(timed: Sequence[tuple[Result, list[float]]]) -> Axis:
    low, high = min(times[0] for _, times in timed), max(times[-1] for _, times in timed)
    ends = [low, max(high, low * 1.5)]
    return logarithmic(ends, decades(*ends), duration)


def _strip(result: Result, lines: Lines, x: Axis) -> Strip:
    row, spread = result.row, result.row.ttft_ms
    assert spread is not None, "only rows with times have strips"
    p5, p50, p95, p99 = (x.at(max(FLOOR, value)) for value in (spread.p5, spread.p50, spread.p95, spread.p99))
    told = [("p5", spread.p5), ("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99), ("mean", spread.mean)]
    words = ", ".join(f"{name} {milliseconds(value)}" for name, value in told)
    shapes = [_rule(at, "rule", -6, 22) for at, _ in x.ticks]
    width = place(max(0.002, p95 - p5))
    shapes += [
        Shape("line", {"x1": place(p95), "x2": place(p99), "y1": "50%", "y2": "50%", "class": "reach"}),
        Shape("rect", {"x": place(p5), "width": width, "height": "100%", "rx": 3, "class": "fill"}),
        _rule(p50, "median", -1, 17),
        Shape("circle", {"cx": place(p99), "cy": "50%", "r": 4, "class": "dot"}),
    ]
    title = lines.title(row)
    colour, label, tip = lines.of(row).colour, f"{title}: {words}", f"{title}\n{words}"
    return Strip(title, milliseconds(spread.p50), shapes, colour, label, tip)


def _rule(at: float, look: str, top: int, bottom: int) -> Shape:
    return Shape("line", {"x1": place(at), "x2": place(at), "y1": top, "y2": bottom, "class": look})


def _foot(x: Axis) -> Strip:
    return Strip("", "p50", [Shape("text", {"x": place(at), "y": 12}, text) for at, text in x.ticks], "scale")


def _curves(timed: Sequence[tuple[Result, list[float]]], lines: Lines, memory: str) -> Chart:
    x, y = _scale(timed), linear(1.0, lambda share: percent(share, 0))
    drawn, over = [], []
    for result, times in timed:
        line = lines.of(result.row)
        values = [(rank, percentile(times, rank)) for rank in PERCENTS]
        told = [
            ((x.at(value), y.at(rank / 100)), f"{line.name}, {memory}\n{rank}% within {milliseconds(value)}")
            for rank, value in values
        ]
        drawn.append(path([point for point, _ in told], line.look))
        over += [Group(marks(line.mark, told[2:-1:4]), line.look), Group(spots(told), line.look)]
    groups = [Group(drawn, stretched=True), *over]
    return Chart(f"Distribution of times to the first token with {memory}", x, y, groups)

"""Times to the first token: a strip for each row, and their distributions, memory by memory."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.lab.report.chart import Axis, Point, decades, frame, linear, logarithmic, marks, path, paths, place
from headwater.lab.report.line import Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import duration, milliseconds, percent
from headwater.lab.report.section import by_memory, empty, panel, panels, section
from headwater.lab.row import Result
from headwater.percentile import percentile

RANKS = (0.01, *(i / 20 for i in range(1, 20)), 0.99, 1.0)
FLOOR = 0.01  # milliseconds: what is shorter is drawn there
ABOUT = "milliseconds from a request's arrival to its first token, on a logarithmic scale"


def latency(results: Sequence[Result], lines: Lines) -> Markup:
    """Empty of rows without time."""
    timed = [(result, times) for result in results if (times := _times(result))]
    if not timed:
        words = "Nothing took time: the requests were replayed one by one (--serve DEVICE gives them a clock)."
        return section("ttft", "Time to the first token", "", empty(words))
    low, high = min(times[0] for _, times in timed), max(times[-1] for _, times in timed)
    x = logarithmic([low, max(high, low * 1.5)], decades(low, max(high, low * 1.5)), duration)
    strips = [_strip(result, lines, x) for result, _ in timed if result.row.ttft_ms is not None]
    legend = tag(
        "ul",
        tag("li", tag("i", class_="whisker"), "p5 to p95"),
        tag("li", tag("i", class_="median"), "p50"),
        tag("li", tag("i", class_="dot"), "p99"),
        class_="legend",
    )
    known = {id(result): times for result, times in timed}
    curves = [
        panel(memory, _curves([(result, known[id(result)]) for result in group], lines, memory))
        for memory, group in by_memory([result for result, _ in timed])
    ]
    return section(
        "ttft",
        "Time to the first token",
        ABOUT,
        legend,
        tag("div", *strips, _scale(x), class_="strips ttft"),
        tag("h3", "Share of requests that had their first token by then"),
        lines.legend("Lines that are drawn"),
        panels(curves),
    )


def _times(result: Result) -> list[float]:
    """Milliseconds, ascending."""
    return sorted(max(FLOOR, 1000 * one.ttft) for one in result.outcomes if one.ttft is not None)


def _strip(result: Result, lines: Lines, x: Axis) -> Markup:
    row, spread = result.row, result.row.ttft_ms
    assert spread is not None, "only rows with times have strips"
    p5, p50, p95, p99 = (x.at(max(FLOOR, value)) for value in (spread.p5, spread.p50, spread.p95, spread.p99))
    told = [("p5", spread.p5), ("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99), ("mean", spread.mean)]
    words = ", ".join(f"{name} {milliseconds(value)}" for name, value in told)
    parts = (
        tag("line", x1=place(p95), x2=place(p99), y1="50%", y2="50%", class_="reach"),
        tag("rect", x=place(p5), width=place(max(0.002, p95 - p5)), height="100%", rx=3, class_="fill"),
        tag("line", x1=place(p50), x2=place(p50), y1=-1, y2=17, class_="median"),
        tag("circle", cx=place(p99), cy="50%", r=4, class_="dot"),
    )
    rules = [tag("line", x1=place(at), x2=place(at), y1=-6, y2=22, class_="rule") for at, _ in x.ticks]
    title = lines.title(row)
    figure = tag(
        "svg",
        *rules,
        *parts,
        class_=f"strip {lines.of(row).colour}",
        role="img",
        aria_label=f"{title}: {words}",
        data_tip=f"{title}\n{words}",
    )
    return tag("div", tag("span", title, class_="name"), figure, tag("span", milliseconds(spread.p50), class_="number"))


def _scale(x: Axis) -> Markup:
    texts = [tag("text", text, x=place(at), y=12) for at, text in x.ticks]
    figure = tag("svg", texts, class_="strip scale", aria_hidden="true")
    return tag("div", tag("span", class_="name"), figure, tag("span", "p50", class_="number"), class_="foot")


def _curves(timed: Sequence[tuple[Result, list[float]]], lines: Lines, memory: str) -> Markup:
    low, high = min(times[0] for _, times in timed), max(times[-1] for _, times in timed)
    ends = [low, max(high, low * 1.5)]
    x, y = logarithmic(ends, decades(*ends), duration), linear(1.0, lambda share: percent(share, 0))
    drawn, over = [], []
    for result, times in timed:
        line, points = lines.of(result.row), _quantiles(times)
        places: list[Point] = [(x.at(value), y.at(rank)) for rank, value in points]
        drawn.append(path(places, line.look))
        told = [f"{line.name}, {memory}\n{percent(rank, 0)} within {milliseconds(value)}" for rank, value in points]
        over.append(marks(line, list(zip(places, told, strict=True))[2:-1:4]))
        over.append(_spots(list(zip(places, told, strict=True)), line.look))
    return frame(f"Distribution of times to the first token with {memory}", x, y, paths(*drawn), *over)


def _quantiles(times: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the distribution: (share of requests, milliseconds)."""
    return [(rank, percentile(times, 100 * rank)) for rank in RANKS]


def _spots(points: Sequence[tuple[Point, str]], look: str) -> Markup:
    """Places without a mark that something is told of."""
    spots = [tag("circle", cx=place(x), cy=place(1 - y), r=5, class_="spot", data_tip=tip) for (x, y), tip in points]
    return tag("g", spots, class_=look)

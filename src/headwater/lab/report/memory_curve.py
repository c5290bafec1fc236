"""Hit rate over memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from headwater.lab.report.chart import Axis, Point, frame, linear, logarithmic, marks, path, paths, round_up
from headwater.lab.report.line import Line, Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import percent, size
from headwater.lab.report.section import empty, section
from headwater.lab.row import Result, Row


def curve(results: Sequence[Result], lines: Lines) -> Markup:
    """A line for each (placement, eviction, pool); for one memory alone a bar for each."""
    rows = [result.row for result in results if result.row.requests]
    about = "prompt tokens that were not computed, of all"
    if not rows:
        return section("memory", "Hit rate over memory", about, empty("No request was replayed."))
    if len({row.memory for row in rows}) == 1:
        return section("memory", "Hit rate", f"{about}; with {size(rows[0].memory)}", _bars(rows, lines))
    body = lines.legend("Lines that are drawn", all_shown=True), _ideal_key(), _figure(rows, lines)
    return section("memory", "Hit rate over memory", about, *body)


def _figure(rows: Sequence[Row], lines: Lines) -> Markup:
    memories = sorted({row.memory for row in rows})
    ends = [memories[0] / 1.06, memories[-1] * 1.06]  # so that no mark lies on the figure's edge
    x, y = logarithmic(ends, memories, size), _scale(rows)
    points: dict[Line, list[tuple[Point, str]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.memory):
        points[lines.of(row)].append(((x.at(row.memory), y.at(row.token_hit_rate)), _tip(row, lines)))
    ideal = [max(row.ideal_hit_rate for row in rows if row.memory == memory) for memory in memories]
    bound = [(x.at(memory), y.at(rate)) for memory, rate in zip(memories, ideal, strict=True)]
    drawn = [path([point for point, _ in told], line.look) for line, told in points.items()]
    over = [marks(line, told) for line, told in points.items()]
    label = f"Hit rate over memory from {size(memories[0])} to {size(memories[-1])}; the same figures stand in the rows"
    edges = [(0.0, bound[0][1]), *bound, (1.0, bound[-1][1])]
    return frame(label, x, y, paths(path(edges, "ideal"), *drawn), *over, kind="tall")


def _bars(rows: Sequence[Row], lines: Lines) -> Markup:
    y = _scale(rows)
    strips = []
    for row in rows:
        width, bound = f"{100 * y.at(row.token_hit_rate):.2f}%", f"{100 * y.at(row.ideal_hit_rate):.2f}%"
        bar = tag("rect", width=width, height="100%", rx=3, class_=f"{lines.of(row).colour} fill")
        ideal = tag("line", x1=bound, x2=bound, y1=-3, y2=19, class_="line ideal")
        label = f"{lines.of(row).name}: {percent(row.token_hit_rate, 2)}"
        figure = tag("svg", bar, ideal, class_="strip", role="img", aria_label=label, data_tip=_tip(row, lines))
        value = tag("span", percent(row.token_hit_rate), class_="number")
        strips.append(tag("div", tag("span", lines.of(row).name, class_="name"), figure, value))
    return tag("div", _ideal_key(), tag("div", strips, class_="strips"))


def _scale(rows: Sequence[Row]) -> Axis:
    return linear(round_up(max(max(row.ideal_hit_rate, row.token_hit_rate) for row in rows)), _share)


def _share(value: float) -> str:
    return percent(value, 0 if round(100 * value, 6).is_integer() else 1)


def _ideal_key() -> Markup:
    sample = tag("svg", tag("line", x1=0, x2=30, y1=7, y2=7, class_="line ideal"), class_="swatch", aria_hidden="true")
    words = "ideal: endless memory and a checkpoint at every unit"
    return tag("ul", tag("li", sample, words), class_="legend")


def _tip(row: Row, lines: Lines) -> str:
    of_ideal = f", {percent(row.token_hit_rate / row.ideal_hit_rate)} of the ideal" if row.ideal_hit_rate else ""
    saved = f"FLOPs saved {percent(row.flops_saved_share, 2)}"
    return f"{lines.title(row)}\nhit rate {percent(row.token_hit_rate, 2)}{of_ideal}\n{saved}"

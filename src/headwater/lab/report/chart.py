"""Axes and the frame of a figure. Places are shares of its width and height, so it fits any window by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headwater.lab.report.line import Line
from headwater.lab.report.markup import Markup, join, tag

GRAIN = 1000  # places of a path are whole numbers up to here
APART = 0.11  # of the width, between the labels of two ticks at least

Point = tuple[float, float]  # shares from the left and from the bottom


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a value stands between 0 and 1, and what is written along."""

    at: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]  # (share, label)


def linear(most: float, write: Callable[[float], str], steps: int = 4) -> Axis:
    """From 0 to `most`."""
    most = most or 1.0
    return Axis(lambda value: value / most, tuple((i / steps, write(most * i / steps)) for i in range(steps + 1)))


def logarithmic(values: Sequence[float], ticks: Iterable[float], write: Callable[[float], str]) -> Axis:
    """From the least to the largest of `values`, with those `ticks` that lie between and not too close."""
    low, high = math.log(min(values)), math.log(max(values))
    span = high - low

    def at(value: float) -> float:
        return (math.log(value) - low) / span if span else 0.5

    kept: list[tuple[float, str]] = []
    for tick in ticks:
        share = at(tick)
        if -1e-9 <= share <= 1 + 1e-9 and (not kept or share - kept[-1][0] >= APART):
            kept.append((share, write(tick)))
    return Axis(at, tuple(kept))


def round_up(value: float) -> float:
    """The next share that a scale can end at."""
    return next((end for end in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8) if value <= end), 1.0)


def round_steps(most: float, steps: int) -> list[float]:
    """0, 500, 1000, ...: at most so many whole steps up to `most`, of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(0, math.floor(math.log10(most / steps)))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if most / step <= steps)
    return [step * i for i in range(math.floor(most / step) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... around a range: fewer where it is wide."""
    steps = (1, 2, 5) if high / low < 40 else (1, 3) if high / low < 3000 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def place(share: float) -> str:
    return f"{100 * share:.2f}%"


def frame(label: str, x: Axis, y: Axis, *parts: Markup, kind: str = "") -> Markup:
    """A figure with its scales. `label` says in words what it shows."""
    rules = [tag("line", x1=0, x2="100%", y1=place(1 - at), y2=place(1 - at)) for at, _ in y.ticks]
    left = [tag("text", text, x=-7, y=place(1 - at), dy=4, class_="left") for at, text in y.ticks]
    below = [
        tag("text", text, x=place(at), y="100%", dy=17, class_="end" if at > 0.985 else None) for at, text in x.ticks
    ]
    scale = tag("g", rules, left, below, class_="scale", aria_hidden="true")
    return tag("svg", scale, *parts, class_=f"plot {kind}".rstrip(), role="img", aria_label=label)


def paths(*drawn: Markup) -> Markup:
    """Room for paths: they stretch, their strokes do not."""
    return tag("svg", *drawn, viewBox=f"0 0 {GRAIN} {GRAIN}", preserveAspectRatio="none", width="100%", height="100%")


def path(points: Sequence[Point], look: str) -> Markup:
    return tag("path", d=f"M{_steps(points)}", class_=f"line {look}")


def area(over: Sequence[Point], under: Sequence[Point], look: str) -> Markup:
    return tag("path", d=f"M{_steps(over)}L{_steps(under[::-1])}Z", class_=f"area {look}")


def marks(line: Line, points: Iterable[tuple[Point, str]]) -> Markup:
    """The line's mark at each point, and what is told of it."""
    uses = [
        tag("use", href=line.mark, x=place(x), y=place(1 - y), class_="mark", data_tip=tip) for (x, y), tip in points
    ]
    return tag("g", join(uses), class_=line.look)


def _steps(points: Sequence[Point]) -> str:
    return "L".join(f"{GRAIN * x:.0f} {GRAIN * (1 - y):.0f}" for x, y in points)

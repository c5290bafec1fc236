"""Scales of charts, for the lab's report (SVG) and load's plots (PNG), and the shapes of an SVG chart as values.

Places are shares of a chart's width and height, from the left and from the bottom, so that a chart fits any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

GRAIN = 1000  # coordinates of an SVG path are whole numbers up to here
MIN_TICK_DISTANCE = 0.11  # minimum distance of two tick labels, as a share of the width

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to shares, with its ticks as (share, label)."""

    at: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """An SVG element with its attributes and text; attributes that are None are left out."""

    element: str
    attributes: Mapping[str, str | float | None]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Shapes with common CSS classes. Paths are `stretched` to the chart's size, their strokes are not."""

    shapes: Sequence[Shape]
    look: str = ""
    stretched: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Groups of shapes between two axes. `label` describes the chart in words; `kind` is a CSS class."""

    label: str
    x: Axis
    y: Axis
    groups: Sequence[Group] = field(default=())
    kind: str = ""


def linear(most: float, write: Callable[[float], str], steps: int = 4) -> Axis:
    """Return a scale from 0 to `most`, in equal steps."""
    most = most or 1.0
    return Axis(lambda value: value / most, tuple((i / steps, write(most * i / steps)) for i in range(steps + 1)))


def rounded(most: float, write: Callable[[float], str]) -> Axis:
    """Return a scale from 0 to `most`, with ticks at round values."""
    most = most or 1.0
    ticks = tuple((tick / most, write(tick)) for tick in round_steps(most, 6, whole=False))
    return Axis(lambda value: value / most, ticks)


def logarithmic(values: Sequence[float], ticks: Iterable[float], write: Callable[[float], str]) -> Axis:
    """Return a scale from the least to the largest of `values`; ticks outside or too close are left out."""
    low, high = math.log(min(values)), math.log(max(values))
    span = high - low

    def at(value: float) -> float:
        return (math.log(value) - low) / span if span else 0.5

    kept: list[tuple[float, str]] = []
    for tick in ticks:
        share = at(tick)
        if -1e-9 <= share <= 1 + 1e-9 and (not kept or share - kept[-1][0] >= MIN_TICK_DISTANCE):
            kept.append((share, write(tick)))
    return Axis(at, tuple(kept))


def round_up(value: float) -> float:
    """Return the end of a scale of shares that includes `value`."""
    return next((end for end in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8) if value <= end), 1.0)


def round_steps(most: float, steps: int, whole: bool = True) -> list[float]:
    """Return 0, 500, 1000, ...: at most `steps` (whole) steps up to `most`, of 1, 2 or 5 times a power of ten."""
    exponent = math.floor(math.log10(most / steps))
    power = 10.0 ** (max(0, exponent) if whole else exponent)
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if most / step <= steps)
    return [step * i for i in range(math.floor(most / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... around a range; a wide range has fewer."""
    steps = (1, 2, 5) if high / low < 40 else (1, 3) if high / low < 3000 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def place(share: float) -> str:
    return f"{100 * share:.2f}%"


def path(points: Sequence[Point], look: str) -> Shape:
    return Shape("path", {"d": f"M{_steps(points)}", "class": f"line {look}"})


def area(over: Sequence[Point], under: Sequence[Point], look: str) -> Shape:
    return Shape("path", {"d": f"M{_steps(over)}L{_steps(under[::-1])}Z", "class": f"area {look}"})


def rect(x: float, width: float, top: float = 1.0, look: str | None = None, tip: str | None = None) -> Shape:
    """Return a bar from the bottom up to `top`."""
    places = {"x": place(x), "width": place(width), "y": place(1 - top), "height": place(top)}
    return Shape("rect", {**places, "class": look, "data-tip": tip})


def marks(mark: str, points: Iterable[tuple[Point, str]]) -> list[Shape]:
    """Return the mark `#mark` at each point, with the point's tooltip."""
    return [
        Shape("use", {"href": mark, "x": place(x), "y": place(1 - y), "class": "mark", "data-tip": tip})
        for (x, y), tip in points
    ]


def spots(points: Iterable[tuple[Point, str]]) -> list[Shape]:
    """Return an invisible spot at each point, for its tooltip."""
    return [
        Shape("circle", {"cx": place(x), "cy": place(1 - y), "r": 5, "class": "spot", "data-tip": tip})
        for (x, y), tip in points
    ]


def _steps(points: Sequence[Point]) -> str:
    return "L".join(f"{GRAIN * x:.0f} {GRAIN * (1 - y):.0f}" for x, y in points)

"""A figure of a paper: its claim, its numbers, and the function that computes ours; and the statistics of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import ConfigError
from headwater.percentile import percentile

if TYPE_CHECKING:
    from papers.lab import Lab

BOX = (0.05, 0.25, 0.5, 0.75, 0.95)  # quartiles, and whiskers at P5 and P95


@dataclass(frozen=True, slots=True)
class Line:
    """One number of the paper and ours. None: not given in the paper, or not available here."""

    label: str
    paper: float | None
    ours: float | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A statement that the paper's figure shows, and whether our lines show it too."""

    says: str
    holds: bool


class Found:
    """The outcome of a figure's run."""

    def __init__(self, lines: Iterable[Line], *shapes: Shape) -> None:
        self.lines, self.shapes = tuple(lines), shapes


@dataclass(frozen=True, slots=True)
class Figure:
    """Texts of a figure (see `figures.toml`), and the function that computes its lines and shapes."""

    name: str  # marconi-11
    title: str
    paper: str  # the paper, and the place in it
    claim: str
    difference: str
    run: Callable[[Lab], Found] | None  # None: the figure needs an engine, and a benchmark writes it


def quantile(values: Sequence[float], share: float) -> float:
    """Return the percentile of a share between 0 and 1."""
    return percentile(_some(values), 100 * share)


def quantiles(
    label: str,
    values: Sequence[float],
    unit: str,
    paper: Mapping[float, float] | None = None,
    shares: Sequence[float] = BOX,
) -> list[Line]:
    """Return a line for each share; `paper` has the paper's numbers by share."""
    known = paper or {}
    return [Line(f"{label}, P{100 * q:.0f}", known.get(q), quantile(values, q), unit) for q in shares]


def mean(values: Sequence[float]) -> float:
    return sum(_some(values)) / len(values)


def ratio(value: float, to: float) -> float:
    if not to:
        raise ConfigError(f"a figure's ratio is {value:g} to 0: too little traffic, or too little memory for it")
    return value / to


def _some(values: Sequence[float]) -> Sequence[float]:
    if not values:
        raise ConfigError("a figure has 0 requests of a kind, at least 1 is needed: too few sessions")
    return values

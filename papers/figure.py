"""A figure of a paper: what it claims, its numbers, and how ours are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from papers.lab import Lab


@dataclass(frozen=True, slots=True)
class Line:
    """One number of the paper's, and ours. None: the paper does not give it, or it cannot be had here."""

    label: str
    paper: float | None
    ours: float | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """Something the paper's figure shows, and whether our lines show it too."""

    says: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a figure came to."""

    lines: tuple[Line, ...]
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """`run` computes lines and shapes; `difference` is written by hand and holds no number that a run would change."""

    name: str  # marconi-11
    title: str
    paper: str  # where in which paper
    claim: str  # what the paper says that it shows
    difference: str  # why ours differs, as far as known
    run: Callable[[Lab], Found] | None  # None: it needs an engine, and a benchmark writes it

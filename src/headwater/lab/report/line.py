"""Colours, dashes and marks of lines: one for each combination of placement, eviction, pool and reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.lab.report.numbers import size
from headwater.lab.row import Result, Row

COLOURS, DASHES, MARKS = 8, 5, 7  # without a common divisor: 280 combinations differ
SHOWN = 8  # lines that are drawn until others are chosen


@dataclass(frozen=True, slots=True)
class Line:
    """A combination of policies, numbered in the order in which rows first have it."""

    number: int
    name: str

    @property
    def colour(self) -> str:
        """CSS class of the colour."""
        return f"c{self.number % COLOURS}"

    @property
    def dash(self) -> str:
        """CSS class of the dash."""
        return f"d{self.number % DASHES}"

    @property
    def look(self) -> str:
        """CSS classes of colour and dash, and the one by which the line is hidden."""
        return f"{self.colour} {self.dash} of-{self.number}"

    @property
    def mark(self) -> str:
        return f"#mark-{self.number % MARKS}"


class Lines:
    """The lines of all rows."""

    def __init__(self, results: Sequence[Result]) -> None:
        rows = [result.row for result in results]
        self._pools = {row.pool for row in rows}
        self._memories = {row.memory for row in rows}
        self._reuses = {reuse_of(row) for row in rows}
        self._lines: dict[tuple[str, ...], Line] = {}
        for row in rows:
            self._lines.setdefault(_key(row), Line(len(self._lines), self._name(row)))

    @property
    def all(self) -> list[Line]:
        return list(self._lines.values())

    def of(self, row: Row) -> Line:
        return self._lines[_key(row)]

    def title(self, row: Row) -> str:
        """Return the line's name, with the row's memory if rows differ in it."""
        name = self.of(row).name
        return f"{name}, {size(row.memory)}" if len(self._memories) > 1 else name

    def _name(self, row: Row) -> str:
        if row.eviction == "none":
            return "no cache"
        parts = [row.placement, row.eviction, *([row.pool] if len(self._pools) > 1 else [])]
        return " · ".join([*parts, *([reuse_of(row)] if len(self._reuses) > 1 else [])])


def reuse_of(row: Row) -> str:
    """Return the kinds of content that prompts made of segments reuse, and the eviction of segments; "" without any."""
    return "" if row.segments is None else row.segments.name


def _key(row: Row) -> tuple[str, ...]:
    return ("none",) if row.eviction == "none" else (row.placement, row.eviction, row.pool, reuse_of(row))

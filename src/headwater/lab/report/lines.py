"""Lines of the report's charts, one for each combination of policies, and the formats of its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headwater.lab.row import Result, Row

T = TypeVar("T")
COLOURS, DASHES, MARKS = 8, 5, 7  # without a common divisor: 280 combinations differ


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
    def __init__(self, results: Sequence[Result]) -> None:
        rows = [result.row for result in results]
        self._pools = {row.pool for row in rows}
        self._memories = {row.memory for row in rows}
        self._reuses = {row.reuse for row in rows}
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
        return " · ".join([*parts, *([row.reuse] if len(self._reuses) > 1 else [])])


def _key(row: Row) -> tuple[str, ...]:
    return ("none",) if row.eviction == "none" else (row.placement, row.eviction, row.pool, row.reuse)


def by_memory(results: Iterable[tuple[Result, T]]) -> list[tuple[str, list[tuple[Result, T]]]]:
    """Group results, each with a value of its own, by memory size in ascending order."""
    grouped: dict[int, list[tuple[Result, T]]] = defaultdict(list)
    for result, value in results:
        grouped[result.row.memory].append((result, value))
    return [(size(memory), grouped[memory]) for memory in sorted(grouped)]


# -- formats of numbers --------------------------------------------------------

BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SI_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def count(value: float) -> str:
    """Format with thousands separators: 1234567 is 1,234,567."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Format with three digits and a unit, for little room: 1234567 is 1.23M."""
    for size, unit in SI_PREFIXES:
        if abs(value) >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{_trimmed(scaled, 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0)}{unit}"
    return count(value)


def tokens(value: float) -> str:
    """Format a length in powers of two: 16384 is 16k."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size:
            return f"{_trimmed(value / size, 1)}{unit}"
    return count(value)


def size(value: float) -> str:
    """Format bytes: 43000000000 is 43 GB."""
    for unit_size, unit in BYTES:
        if value >= unit_size:
            return f"{_trimmed(value / unit_size, 2)} {unit}"
    return f"{value:.0f} B"


def percent(share: float, digits: int = 1) -> str:
    """Format a share: 0.8123 is 81.2%."""
    return f"{100 * share:.{digits}f}%"


def milliseconds(value: float) -> str:
    """Format milliseconds: 81.234 is 81.2 ms, 8123.4 is 8.12 s."""
    if value >= 1000:
        return f"{value / 1000:,.2f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def duration(milliseconds: float) -> str:
    """Format milliseconds of an axis: 300 is 300 ms, 3000 is 3 s."""
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

"""Sections of the report, their blocks, and the looks of lines; the template has a macro for each kind of block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.chart import Chart, Shape
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


class Block:
    """A part of a section."""

    @property
    def macro(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Empty(Block):
    """A sentence in the place of figures."""

    words: str


@dataclass(frozen=True)
class Heading(Block):
    """A heading within a section."""

    words: str


@dataclass(frozen=True)
class Legend(Block):
    """Keys of a chart: (kind of sample, its CSS classes, name, explanation)."""

    keys: Sequence[tuple[str, str, str, str]]


@dataclass(frozen=True)
class Keys(Block):
    """Checkboxes to choose the lines that are drawn."""

    lines: Sequence[Line]
    shown: int  # the first of them are checked


@dataclass(frozen=True)
class Panels(Block):
    """Charts side by side, each with a caption."""

    charts: Sequence[tuple[str, Chart]]
    kind: str = ""


@dataclass(frozen=True)
class Plot(Block):
    """One chart over the whole width."""

    chart: Chart


@dataclass(frozen=True)
class Strip:
    """One horizontal bar with its name and its value."""

    name: str
    value: str
    shapes: Sequence[Shape]
    look: str = ""
    label: str | None = None  # None: a scale, hidden from screen readers
    tip: str | None = None


@dataclass(frozen=True)
class Strips(Block):
    """Horizontal bars, one below the other."""

    strips: Sequence[Strip]
    kind: str = ""


@dataclass(frozen=True)
class Piece:
    """One part of a stacked bar."""

    name: str  # the CSS class, too
    words: str
    grow: int
    share: str
    tip: str


@dataclass(frozen=True)
class Pairs(Block):
    """Two stacked bars a row: (name, ((label, pieces), (label, pieces)))."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, Sequence[Piece]]]]]


@dataclass(frozen=True)
class Figures(Block):
    """The numbers of a chart as a table, to read and to copy."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Cell:
    """A cell of the table of rows: text, or a number with its exact value."""

    text: str
    value: float | None = None
    is_text: bool = False
    line: Line | None = None  # a sample of the line is drawn before the text
    star: bool = False


@dataclass(frozen=True)
class Table(Block):
    """The table of rows: heads (name, explanation, is a number), and rows (is the best, cells)."""

    heads: Sequence[tuple[str, str, bool]]
    rows: Sequence[tuple[bool, Sequence[Cell]]]


@dataclass(frozen=True)
class Notes(Block):
    """Notes on the run, and definitions of the terms."""

    notes: Sequence[str]
    terms: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A card of the page."""

    name: str
    title: str
    about: str
    blocks: Sequence[Block] = field(default=())


def by_memory(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the results of each memory size, in ascending order."""
    grouped: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        grouped[result.row.memory].append(result)
    return [(size(memory), grouped[memory]) for memory in sorted(grouped)]

"""What tells the rows' policies apart: each (placement, eviction, pool, reuse) has a colour, a dash and a mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.lab.report.markup import Markup, join, tag
from headwater.lab.report.numbers import size
from headwater.lab.row import Result, Row

COLOURS, DASHES, MARKS = 8, 5, 7  # without a common divisor: 280 differ
SHOWN = 8  # lines that are drawn until others are chosen


@dataclass(frozen=True, slots=True)
class Line:
    """One (placement, eviction, pool, reuse of segments), in the order in which they first come."""

    number: int
    name: str

    @property
    def colour(self) -> str:
        """A CSS class, as all of these."""
        return f"c{self.number % COLOURS}"

    @property
    def dash(self) -> str:
        return f"d{self.number % DASHES}"

    @property
    def look(self) -> str:
        """Colour and dash, and by which it is hidden and shown."""
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

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, row: Row) -> Line:
        return self._lines[_key(row)]

    def title(self, row: Row) -> str:
        """The line's name and, where they differ, the row's memory."""
        name = self.of(row).name
        return f"{name}, {size(row.memory)}" if len(self._memories) > 1 else name

    def _name(self, row: Row) -> str:
        if row.eviction == "none":
            return "no cache"
        parts = [row.placement, row.eviction, *([row.pool] if len(self._pools) > 1 else [])]
        return " · ".join([*parts, *([reuse_of(row)] if len(self._reuses) > 1 else [])])

    def styles(self) -> str:
        """Rules by which an unchecked box hides its line in its section, without a script."""
        return "".join(
            f'section:has(input[value="{line.number}"]:not(:checked)) .of-{line.number}{{display:none}}'
            for line in self._lines.values()
        )

    def legend(self, label: str, all_shown: bool = False) -> Markup:
        """What looks how, and boxes to choose what is drawn."""
        keys = [
            tag(
                "label",
                tag("input", type="checkbox", value=line.number, checked=all_shown or line.number < SHOWN),
                swatch(line),
                line.name,
                class_=line.colour,
            )
            for line in self._lines.values()
        ]
        return tag("div", keys, class_="keys", role="group", aria_label=label)


def swatch(line: Line) -> Markup:
    """A piece of the line, with its mark."""
    return tag(
        "svg",
        tag("line", x1=0, x2=30, y1=7, y2=7, class_=f"line {line.dash}"),
        tag("use", href=line.mark, x=15, y=7, class_="mark"),
        class_=f"swatch {line.colour}",
        aria_hidden="true",
    )


def marks() -> Markup:
    """The shapes, once a page; each is around (0, 0)."""
    shapes = (
        tag("circle", r=4),
        tag("path", d="M-4-4H4V4H-4Z"),
        tag("path", d="M0-5L5 4H-5Z"),
        tag("path", d="M0-5.5L5 0L0 5.5L-5 0Z"),
        tag("path", d="M0 5L5-4H-5Z"),
        tag("path", d="M-1.6-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z"),
        tag("path", d="M-5-2.5L0-5.5L5-2.5V2.5L0 5.5L-5 2.5Z"),
    )
    symbols = [tag("g", shape, id=f"mark-{number}") for number, shape in enumerate(shapes)]
    return tag("svg", tag("defs", join(symbols)), width=0, height=0, class_="defs", aria_hidden="true")


def reuse_of(row: Row) -> str:
    """What is reused of prompts made of segments, and which segment goes first."""
    return "" if row.segments is None else row.segments.name


def _key(row: Row) -> tuple[str, ...]:
    return ("none",) if row.eviction == "none" else (row.placement, row.eviction, row.pool, reuse_of(row))

"""Tables for the terminal: they fit the width they are printed in, and no figure is cut or broken into two lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

RULE = 3  # characters of a column around its cells: padding and a rule
READABLE = 20  # characters below which a column of words is not narrowed
MAX_PARTS = 3


class Kind(Enum):
    """Kind of a column: labels name the row, figures stay on one line, words wrap at spaces."""

    LABEL = "label"
    FIGURE = "figure"
    WORDS = "words"


@dataclass(slots=True)
class Column:
    """A column and its cells. Widths are in characters."""

    name: str
    kind: Kind
    cells: list[str | Text] = field(default_factory=list)

    @property
    def natural(self) -> int:
        """Width in which nothing wraps."""
        return max(len(self.name), *(_widest(str(cell).splitlines()) for cell in self.cells), 1)

    @property
    def least(self) -> int:
        """Smallest width: names wrap at their spaces, and so do cells without figures."""
        if self.kind is Kind.FIGURE:
            return max(_widest(self.name.split()), *(_widest(str(cell).splitlines()) for cell in self.cells), 1)
        words = (word for text in (self.name, *map(str, self.cells)) for word in text.split())
        return max(_widest(words), min(self.natural, READABLE))


class Table:
    """A table in one part if it fits, or in several below each other, each with the labels of the rows.

    If one column does not even fit next to the labels, or more than MAX_PARTS were needed, every row is a record: its
    labels in a line, and its cells with their names below.
    """

    def __init__(
        self,
        title: str | None,
        labels: Sequence[str],
        figures: Sequence[str] = (),
        words: Sequence[str] = (),
        *,
        caption: str = "",
        header: bool = True,
    ) -> None:
        """Set the columns in the order labels, figures, words."""
        kinds = ((Kind.LABEL, labels), (Kind.FIGURE, figures), (Kind.WORDS, words))
        self.columns = [Column(name, kind) for kind, names in kinds for name in names]
        self.title, self.caption, self.header = title, caption, header
        self._sections: set[int] = set()

    @property
    def row_count(self) -> int:
        return len(self.columns[0].cells)

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; cells that are missing at the end are empty. Texts are shown as they are, without markup."""
        for column, cell in zip_longest(self.columns, cells, fillvalue=""):
            assert isinstance(column, Column), "at most as many cells as columns"
            column.cells.append(cell)

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self._sections.add(self.row_count - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="table.title", overflow="fold")
        parts = self._parts(options.max_width)
        if parts is None:
            yield from self._records()
        else:
            yield from (self._grid(part, options.max_width) for part in parts)
        if self.caption:
            yield Text(self.caption, style="table.caption", overflow="fold")

    def _parts(self, width: int) -> list[list[Column]] | None:
        """Divide the columns into parts of at most `width` characters; None if records are more readable."""
        labels = [column for column in self.columns if column.kind is Kind.LABEL]
        room = width - 1 - sum(label.least + RULE for label in labels)
        parts, left = [list(labels)], room
        for column in self.columns[len(labels) :]:
            needed = column.least + RULE
            if needed > room:
                return None
            if needed > left:
                parts.append(list(labels))
                left = room
            parts[-1].append(column)
            left -= needed
        return parts if room >= 0 and len(parts) <= MAX_PARTS else None

    def _grid(self, part: Sequence[Column], width: int) -> Grid:
        grid = Grid(show_header=self.header)
        for column, wide in zip(part, _widths(part, width - 1 - RULE * len(part)), strict=True):
            justify: JustifyMethod = "right" if column.kind is Kind.FIGURE else "left"
            grid.add_column(column.name, justify=justify, width=wide, overflow="fold")
        for number in range(self.row_count):
            grid.add_row(*(_text(column, number) for column in part), end_section=number in self._sections)
        return grid

    def _records(self) -> Iterator[Text | Padding]:
        """Yield the labels of each row, then its figures, then its words; empty cells are left out."""
        for number in range(self.row_count):
            cells = {kind: [column for column in self.columns if column.kind is kind] for kind in Kind}
            labels = [str(column.cells[number]) for column in cells[Kind.LABEL]]
            yield Text("  ".join(filter(None, labels)), style="bold", overflow="fold")
            figures = [_named(column, number) for column in cells[Kind.FIGURE] if column.cells[number]]
            words = [_named(column, number) for column in cells[Kind.WORDS] if column.cells[number]]
            for line in ([Text(", ").join(figures)] if figures else []) + words:
                yield Padding(line, (0, 0, 0, 2))


def _text(column: Column, number: int) -> Text:
    """Return a cell as text, in which brackets are not markup."""
    cell = column.cells[number]
    return Text(cell) if isinstance(cell, str) else cell


def _named(column: Column, number: int) -> Text:
    """Return a cell behind the name of its column."""
    return Text(f"{column.name} " if column.name else "", overflow="fold") + _text(column, number)


def _widths(columns: Sequence[Column], room: int) -> list[int]:
    """Return the width of each column: its least, and the rest for those that lack most."""
    widths = [column.least for column in columns]
    lacking = [column.natural - column.least for column in columns]
    for _ in range(room - sum(widths)):
        most = max(range(len(columns)), key=lacking.__getitem__)
        if lacking[most] <= 0:
            break
        widths[most] += 1
        lacking[most] -= 1
    return widths


def _widest(texts: Iterator[str] | Sequence[str]) -> int:
    return max(map(len, texts), default=0)

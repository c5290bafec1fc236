"""Parts of the lab's commands: options, traces, lists of choices; and the table and the files of `headwater replay`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.common import write_whole
from headwater.errors import ConfigError
from headwater.lab.report import write_report
from headwater.lab.report.blocks import reuse_of
from headwater.lab.row import Result, Row
from headwater.traces.read import make_trace
from headwater.traces.request import Trace

T = TypeVar("T")
progress_console = Console(stderr=True)

TraceFile = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="Recorded traffic: a file, or a name below --data; or drawn: rag(zipf=1)."),
]
Data = Annotated[Path | None, typer.Option(help="Folder in which traces are looked up by name.")]
Tokenizer = Annotated[Path | None, typer.Option(help="tokenizer.json for text; without one, a fast built-in split.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read the first so many sessions (or single requests) only.")]
Arrival = Annotated[
    str | None,
    typer.Option(
        help="When requests come: sessions a second (2.0), poisson(rate=2.0, think=5), recorded(speed=2), "
        "closed(clients=8). Without it as recorded, where nothing is, Poisson."
    ),
]
ModelName = Annotated[str, typer.Option("--model", help="A profile (`headwater profiles`), or a checkpoint's folder.")]
PageTokens = Annotated[int, typer.Option("--page-size", min=1, help="Tokens a page.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Jobs = Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


def read(trace: str, data: Path | None, tokenizer: Path | None, limit: int | None, seed: int) -> Trace:
    """Read or draw a trace, and print how long that took."""
    with progress_console.status(f"reading {trace}"):
        found = make_trace(trace, data, tokenizer, limit, seed)
    sessions = len({request.session for request in found.requests})
    tokens = sum(request.prompt_tokens for request in found.requests)
    progress_console.print(
        f"{found.name}: read in {found.seconds:.1f} s\n"
        f"{len(found.requests):,} requests of {sessions:,} sessions, {tokens:,} prompt tokens",
        highlight=False,
    )
    return found


def choices(text: str, of: Callable[[str], T]) -> list[T]:
    """Split a list at its commas outside brackets: `lru,seglen(w=0.5, single_child=False)`."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    if not all(item.strip() for item in items):
        raise ConfigError(f"{text!r} is no list of choices: one of them is empty")
    return [of(item.strip()) for item in items]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output files of a replay, written when it ends; None is not wanted."""

    trace: Trace
    model: str
    page_size: int
    json_file: Path | None
    per_request: Path | None
    report: Path | None

    def write(self, results: Sequence[Result]) -> None:
        """Write each file completely, or not at all."""
        if self.json_file is not None:
            rows = [result.row.as_dict() for result in results]
            document = {"trace": self.trace.name, "model": self.model, "page_size": self.page_size, "rows": rows}
            write_whole(self.json_file, [json.dumps(document, indent=1) + "\n"])
        if self.per_request is not None:
            write_whole(self.per_request, _lines(results))
        if self.report is not None:
            write_report(self.report, self.trace.name, self.model, self.trace.notes, results)


def results_table(trace: Trace, model: str, results: Sequence[Result], width: int) -> Table:
    """Return a row for each result in the order of the options, with the reader's inferences as a caption.

    Columns of high rank are left out until the table fits into `width` characters.
    """
    rows = [result.row for result in results]
    shown = _fitting([column for column in COLUMNS if column.shown(rows)], rows, width)
    table = Table(title=f"{trace.name}, {model}", title_justify="left", caption="\n".join(trace.notes) or None)
    table.caption_justify = "left"
    for column in shown:
        words = column.name in ("pool", "policy")
        table.add_column(column.name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, and whether any row has its figure."""

    name: str
    cell: Callable[[Row], str]
    rank: int = 0  # columns of the highest rank are left out first
    shown: Callable[[Sequence[Row]], bool] = lambda rows: True

    def width(self, rows: Sequence[Row]) -> int:
        """Return the column's width in characters with its rule; a policy may be folded."""
        widest = max(len(self.name), *(len(self.cell(row)) for row in rows))
        return 3 + (min(widest, 20) if self.name == "policy" else widest)


def _fitting(columns: list[Column], rows: Sequence[Row], width: int) -> list[Column]:
    while sum(column.width(rows) for column in columns) + 1 > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _timed(rows: Sequence[Row]) -> bool:
    return any(row.ttft_ms is not None for row in rows)


def _policy(row: Row) -> str:
    alpha = "" if row.alpha is None else f" α={row.alpha:g}"
    return f"{row.placement} / {row.eviction}{alpha}" if row.eviction != "none" else "no cache"


def _of_ideal(row: Row) -> str:
    return f"{row.token_hit_rate / row.ideal_hit_rate:.1%}" if row.ideal_hit_rate else ""


def _ttft(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.ttft_ms is None else f"{getattr(row.ttft_ms, name):,.0f}"


def _of_segments(rows: Sequence[Row]) -> bool:
    return any(row.segments is not None for row in rows)


def _share(name: str, rank: int) -> Column:
    """Return a column with the share of that kind of tokens in all prompt tokens."""

    def cell(row: Row) -> str:
        tokens = 0 if row.segments is None else getattr(row.segments, f"{name}_tokens")
        return f"{tokens / max(1, row.prompt_tokens):.1%}"

    return Column(name, cell, rank, _of_segments)


SEGMENT_COLUMNS = (_share("prefix", 0), _share("composed", 0), _share("seam", 1), _share("made", 0))
COLUMNS = (
    Column("GB", lambda row: f"{row.memory / 1e9:,.4g}"),
    Column("pool", lambda row: row.pool, 0, lambda rows: any(row.pool != "unified" for row in rows)),
    Column("policy", _policy),
    Column("reuse", reuse_of, 0, _of_segments),
    Column("hits", lambda row: f"{row.token_hit_rate:.1%}"),
    Column("of ideal", _of_ideal, 0, lambda rows: not _of_segments(rows)),
    Column("FLOPs", lambda row: f"{row.flops_saved_share:.1%}", 3),
    *SEGMENT_COLUMNS,
    Column("reused", lambda row: f"{_short(row.checkpoints_hit)} of {_short(row.checkpoints_taken)}", 4),
    Column("stranded", lambda row: _short(row.stranded_tokens), 5),
    Column("TTFT", _ttft("p50"), 0, _timed),
    Column("p95", _ttft("p95"), 0, _timed),
    Column("queue", lambda row: "" if row.queue_depth is None else f"{row.queue_depth:.2f}", 1, _timed),
    Column("s", lambda row: f"{row.seconds:.1f}", 2),
)


def _short(number: int) -> str:
    """Format a number in at most five characters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _lines(results: Sequence[Result]) -> Iterable[str]:
    for result in results:
        row = result.row
        setup = {"memory": row.memory, "pool": row.pool, "placement": row.placement, "eviction": row.eviction}
        if row.segments is not None:
            setup |= {"reuse": row.segments.reuse, "segment_eviction": row.segments.eviction}
        for outcome in result.outcomes:
            yield json.dumps({**setup, **outcome.as_dict()}) + "\n"

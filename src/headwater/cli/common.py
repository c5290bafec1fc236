"""The command group, and helpers of several commands: options, consoles, files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.config import SETTINGS
from headwater.errors import ConfigError

WIDTH = 140  # of tables that are written to a file or a pipe

commands = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()

HELP = {one.name: one.help for one in SETTINGS}
Model = Annotated[Path | None, typer.Argument(help="Folder of a checkpoint; without it, the embedded model.")]
Memory = Annotated[str, typer.Option(help=HELP["memory"])]
Dtype = Annotated[str, typer.Option(help=HELP["dtype"])]
PageSize = Annotated[int, typer.Option(help=HELP["page_size"])]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file as JSON.")]
ApiKey = Annotated[str | None, typer.Option(envvar="HEADWATER_API_KEY", help="API key of the server.")]
ServedModel = Annotated[str | None, typer.Option(help="Name of the model; without it, the first one listed.")]


def show(*shown: Table | str) -> None:
    """Print tables and lines: as wide as the terminal, or WIDTH if there is none."""
    wide = console if console.is_terminal else Console(width=WIDTH)
    for one in shown:
        wide.print(one, markup=False, highlight=False)


def one_of(name: str, value: str, allowed: Iterable[str]) -> Any:
    """Return a value if it is allowed. Raises ConfigError."""
    if value not in (names := tuple(allowed)):
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(names)}")
    return value


def jsonable(value: object) -> object:
    """Return the value of an option as JSON has it."""
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def check_writable(*paths: Path | None) -> None:
    """Raise ConfigError, before a command computes anything, for a file that cannot be written."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
            raise ConfigError(f"{path} cannot be written: it is a folder, or its folder is missing or read-only")


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write a file beside `path`, and rename it to `path` when it is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; gives the function that advances it."""
    terminal = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)


def figures_table(title: str | None, label: str, *numbers: str) -> Table:
    """Return a table with a column of labels, and columns of numbers."""
    table = Table(title=title, title_justify="left")
    table.add_column(label, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right")
    return table

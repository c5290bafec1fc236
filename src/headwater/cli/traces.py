"""Lists for `headwater replay`: the formats of recorded traffic, and the traces in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from headwater.cli.common import show
from headwater.errors import ConfigError
from headwater.machine import in_units
from headwater.table import Table
from headwater.traces.read import READERS, traces_of


def _print_formats(wanted: bool) -> None:
    if wanted:
        width = max(map(len, READERS))
        show(*(f"{name:{width}}  {reader.about}" for name, reader in READERS.items()))
        raise Exit


Formats = Annotated[
    bool, Option("--formats", is_eager=True, callback=_print_formats, help="List the formats of traces, and exit.")
]


def traces_table(data: Path | None) -> Table:
    """Return the traces in a folder, with their formats. Raises ConfigError without a folder."""
    if data is None:
        raise ConfigError("no TRACE is given: a file, a folder, or generated(0); --data FOLDER lists those of a folder")
    if not data.is_dir():
        raise ConfigError(f"--data {data} is not a folder")
    table = Table(str(data), ("trace", "format"), ("size",))
    for name, kind, size in traces_of(data):
        table.add_row(name, kind, in_units(size))
    return table

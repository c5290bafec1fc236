"""What the commands share: the command group, the console, and options that several of them take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater.config import SETTINGS

commands = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()

HELP = {one.name: one.help for one in SETTINGS}
Model = Annotated[Path | None, typer.Argument(help="Folder of a checkpoint; without it, the embedded default.")]
Memory = Annotated[str, typer.Option(help=HELP["memory"])]
Dtype = Annotated[str, typer.Option(help=HELP["dtype"])]
PageSize = Annotated[int, typer.Option(help=HELP["page_size"])]

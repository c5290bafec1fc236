"""What the commands share: the command group, the console, and options that several of them take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater.config import DTYPES, user_cache_dir

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()

Model = Annotated[Path | None, typer.Argument(help="Folder of a checkpoint; without it, the embedded default.")]
Memory = Annotated[str, typer.Option(help="For KV, checkpoints and running states: 4GB is 10^9, 4GiB is 2^30.")]
Dtype = Annotated[str, typer.Option(help=f"To compute in: {', '.join(DTYPES)}.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page: a multiple of 64.")]


def default_checkpoint() -> Path:
    from headwater.models.tiny import ensure_default  # imports torch

    return ensure_default(user_cache_dir())

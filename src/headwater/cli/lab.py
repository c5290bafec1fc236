"""What the lab's commands share: reading a trace, when its requests come, and lists of choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from headwater.errors import ConfigError
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
    """Read a trace, or draw it, and say how long reading took."""
    with progress_console.status(f"reading {trace}"):
        found = make_trace(trace, data, tokenizer, limit, seed)
    sessions = len({request.session for request in found.requests})
    tokens = sum(request.prompt_tokens for request in found.requests)
    progress_console.print(
        f"{found.name}: {len(found.requests):,} requests of {sessions:,} sessions, {tokens:,} prompt tokens; "
        f"read in {found.seconds:.1f} s",
        highlight=False,
    )
    return found


def choices(text: str, of: Callable[[str], T]) -> list[T]:
    """A list with commas, each item of which may have commas in brackets: `lru,seglen(w=0.5, single_child=False)`."""
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

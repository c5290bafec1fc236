"""`headwater eval`: how right a server's answers are, and whether its cache changes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headwater.cli.common import HELP, Model, commands, console
from headwater.cli.lab_output import check_writable, write_whole
from headwater.client.machine import machine
from headwater.errors import ConfigError
from headwater.quality import report
from headwater.quality.asking import Run, Scored
from headwater.quality.item import DEFAULT_TASKS, read_items
from headwater.quality.own_server import own_server
from headwater.quality.server import Server
from headwater.quality.summary import Comparison, sliced
from headwater.quality.tables import comparison_table, faults, kinds_by_context, sliced_table
from headwater.quality.ways import PAIRED, SINGLE, WAYS

WIDTH = 140  # of tables in a file


@commands.command("eval")
def evaluate(
    context: typer.Context,
    model: Model = None,
    url: Annotated[str | None, typer.Option(help="Of a running server; without it, one is started.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HEADWATER_API_KEY")] = None,
    model_name: Annotated[str | None, typer.Option(help="Without it, the first that the server lists.")] = None,
    memory: Annotated[str, typer.Option(help=f"Of a server that is started. {HELP['memory']}")] = "1GB",
    tasks: Annotated[Path, typer.Option(help="JSON lines, plain or packed.", show_default=False)] = DEFAULT_TASKS,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many items only.")] = None,
    paired: Annotated[bool, typer.Option("--paired", help=f"Each item under: {', '.join(PAIRED)}.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model reason first.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Groups of items asked at once.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that an answer may take.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure and every answer.")] = None,
) -> None:
    """Ask a server questions whose answers are known: exact match, token F1, tool calls, cached tokens."""
    options = SimpleNamespace(**context.params)  # the same values under the same names
    if model is not None and url is not None:
        raise ConfigError(f"model is {model} and url is {url}: give one of them")
    check_writable(json_file)
    items = read_items(tasks)[:limit]
    with serving(options) as server:
        columns = asked(options, server, items)
        found = told(options, columns)
        if json_file is not None:
            settings = {name: shown(value) for name, value in vars(options).items() if name != "api_key"}
            about = {"settings": settings, "machine": machine(), "server": server.about}
            write_whole(json_file, [json.dumps({**about, **found}, indent=1) + "\n"])
    if not any(one.answered.ok for column in columns.values() for one in column):
        raise typer.Exit(1)


@contextmanager
def serving(options: SimpleNamespace) -> Iterator[Server]:
    """The server that was named, or one that is started."""
    if options.url is None:
        with own_server(options.model, options.memory) as url, closing(server_at(options, url)) as server:
            yield server
    else:
        with closing(server_at(options, options.url)) as server:
            yield server


def server_at(options: SimpleNamespace, url: str) -> Server:
    try:
        return Server(url, options.api_key, options.model_name, options.timeout)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def asked(options: SimpleNamespace, server: Server, items: list[Any]) -> dict[str, list[Scored]]:
    ways = PAIRED if options.paired else SINGLE
    with progress() as bar:
        task = bar.add_task("asking", total=len(items) * sum(len(WAYS[way].columns) for way in ways))
        run = Run(
            server,
            items,
            max_tokens=options.max_tokens,
            thinking=options.thinking,
            at_once=options.concurrency,
            logprobs=options.paired,
            on_answer=lambda answered: bar.advance(task),
        )
        return run.asked(ways)


def told(options: SimpleNamespace, columns: dict[str, list[Scored]]) -> dict[str, Any]:
    """Print the tables; returns their figures."""
    first, *others = columns
    slices = {name: sliced(column, options.seed) for name, column in columns.items()}
    comparisons = {name: Comparison.of(columns[name], columns[first], options.seed) for name in others}
    wide = console if console.is_terminal else Console(width=WIDTH)
    wide.print(sliced_table(first, slices[first]))
    wide.print(kinds_by_context(columns[first], options.seed))
    if comparisons:
        wide.print(comparison_table(first, comparisons))
    for name, column in columns.items():
        for fault in faults(column):
            wide.print(f"{name}: {fault}", markup=False, highlight=False)
    return report.evaluation(columns, slices, comparisons)


def progress() -> Progress:
    told_on = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=told_on, transient=True, disable=not told_on.is_terminal)


def shown(value: object) -> object:
    """A setting as JSON has it."""
    return str(value) if isinstance(value, Path) else value

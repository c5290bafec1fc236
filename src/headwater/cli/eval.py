"""`headwater eval`: how right a server's answers are, and whether its cache changes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from headwater import machine
from headwater.cli.common import HELP, Model, commands
from headwater.cli.eval_measures import measure_of, server_at
from headwater.cli.lab_output import check_writable, write_whole
from headwater.errors import ConfigError
from headwater.evaluate.item import DEFAULT_TASKS
from headwater.evaluate.own_server import own_server
from headwater.evaluate.server import Server
from headwater.evaluate.ways import PAIRED, SEGMENTS


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
    text: Annotated[
        Path | None,
        typer.Option(
            help="In place of tasks, a text's perplexity: UTF-8, plain or packed.", exists=True, dir_okay=False
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of the text that are scored in one go.")] = 1024,
    against: Annotated[
        str | None, typer.Option(help="URL of another server: the divergence of next tokens, in place of scores.")
    ] = None,
    paired: Annotated[bool, typer.Option("--paired", help=f"Each item under: {', '.join(PAIRED)}.")] = False,
    segments: Annotated[
        bool, typer.Option("--segments", help=f"Each item with documents, marked, under: {', '.join(SEGMENTS)}.")
    ] = False,
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
    measure = measure_of(options)
    with serving(options) as server:
        found, answered = measure(server)
        if json_file is not None:
            settings = {name: shown(value) for name, value in vars(options).items() if name != "api_key"}
            about = {"settings": settings, "machine": machine.describe(), "server": server.about}
            write_whole(json_file, [json.dumps({**about, **found}, indent=1) + "\n"])
    if not answered:
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


def shown(value: object) -> object:
    """A setting as JSON has it."""
    return str(value) if isinstance(value, Path) else value

"""The command group, and helpers of several commands: options, consoles, traces, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from headwater import machine
from headwater.cache.spelling import split
from headwater.cache_folder import write_whole
from headwater.config import SETTINGS
from headwater.errors import ConfigError
from headwater.spec import ModelCosts
from headwater.table import Table
from headwater.traces.read import make_trace
from headwater.traces.recordings import Served
from headwater.traces.request import Trace

T = TypeVar("T")

commands = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()
progress_console = Console(stderr=True)

HELP = {one.name: one.help for one in SETTINGS}
SERVER = {one.name: str(one.default) for one in SETTINGS if one.name in ("eviction", "placement")}
OWN = {name: f"[default: that of the recording's server, else {value}]" for name, value in SERVER.items()}
MODEL_FOLDER = "Folder of a checkpoint, a GGUF file, or ORG/NAME; without it, the embedded model."
Model = Annotated[Path | None, typer.Argument(help=MODEL_FOLDER)]
Memory = Annotated[str, Option(help=HELP["memory"])]
Dtype = Annotated[str, Option(help=HELP["dtype"])]
Weights = Annotated[str, Option(help=HELP["weights"])]
PageSize = Annotated[int, Option(help=HELP["page_size"])]
JsonFile = Annotated[Path | None, Option("--json", help="Write all figures to this file as JSON.")]
ApiKey = Annotated[str | None, Option(envvar="HEADWATER_API_KEY", help="API key of the server.")]
ServedModel = Annotated[str | None, Option(help="Name of the model; without it, the first one listed.")]
ANY_MODEL = "qwen3.5-9b"  # of traffic that names none
MODEL_HELP = f"A profile (`headwater profiles`), a folder, or ORG/NAME. [default: the recording's, else {ANY_MODEL}]"
SOURCES = "Recorded traffic: a file, a folder of sessions, or a name below --data; or drawn: generated(17)."
TraceFile = Annotated[str, typer.Argument(metavar="TRACE", help=SOURCES)]
LISTED = f"{SOURCES} Without it, the traces of --data are listed."
OptionalTrace = Annotated[str | None, typer.Argument(metavar="TRACE", help=LISTED)]
Data = Annotated[Path | None, Option(help="Folder in which traces are looked up by name.")]
Tokenizer = Annotated[Path | None, Option(help="tokenizer.json for text; without one, a fast built-in split.")]
Limit = Annotated[int | None, Option(min=1, help="Read only the first N sessions (or single requests).")]
ARRIVALS = (
    "When requests come: sessions a second (2.0), poisson(rate=2.0, think=5), recorded(speed=2), closed(clients=8), "
    "open(rate=8, sessions=10, think=5). Without it, as recorded, else Poisson."
)
BlockTokens = Annotated[int | None, Option(min=1, help="Tokens of a hashed block, if not the format's usual number.")]
Arrival = Annotated[str | None, Option(help=ARRIVALS)]
ModelName = Annotated[str | None, Option("--model", help=MODEL_HELP)]
PageTokens = Annotated[int, Option("--page-size", min=1, help="Tokens a page.")]
RecordedWeights = Annotated[
    str | None, Option("--weights", help=f"{HELP['weights']} [default: the recording's, else auto]")
]
Seed = Annotated[int, Option(help="Seed of everything that is drawn.")]
Jobs = Annotated[int, Option(min=0, help="Processes; 0: one a core.")]


def show(*shown: Table | str) -> None:
    """Print tables and lines: as wide as COLUMNS says, else the terminal, else 80 characters."""
    for one in shown:
        console.print(one, markup=False, highlight=False, soft_wrap=isinstance(one, str))


def one_of(name: str, value: str, allowed: Iterable[str]) -> Any:
    """Return a value if it is allowed. Raises ConfigError."""
    if value not in (names := tuple(allowed)):
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(names)}")
    return value


def read(
    trace: str, data: Path | None, tokenizer: Path | None, limit: int | None, seed: int, block_tokens: int | None = None
) -> Trace:
    """Read or draw a trace, and print how long that took."""
    with progress_console.status(f"reading {trace}"):
        found = make_trace(trace, data, tokenizer, limit, seed, block_tokens)
    sessions = len({request.session for request in found.requests})
    tokens = sum(request.prompt_tokens for request in found.requests)
    counts = f"{len(found.requests):,} requests of {sessions:,} sessions, {tokens:,} prompt tokens"
    progress_console.print(f"{found.name}: read in {found.seconds:.1f} s\n{counts}", highlight=False)
    return found


def policies_for(placement: str | None, eviction: str | None, recorded: Served | None) -> tuple[str, str]:
    """Return the given policies; the default is that of the recording's server, or the server's own."""

    def chosen(name: str, given: str | None) -> str:
        return given or getattr(recorded, name, "") or SERVER[name]

    return chosen("placement", placement), chosen("eviction", eviction)


def choices(text: str, of: Callable[[str], T]) -> list[T]:
    """Read a list of choices with commas between them; those within brackets do not count."""
    items = split(text)
    if not all(items):
        raise ConfigError(f"{text!r} is not a list of choices: one of them is empty")
    return [of(item) for item in items]


def formats(costs: ModelCosts) -> dict[str, str]:
    """Return the data type that a model computes in, and the format in which its weights are held."""
    return {"dtype": costs.dtype_name, "weights": costs.weights_held}


def formats_line(costs: ModelCosts) -> str:
    """Describe the formats of a model, and its weights' bytes."""
    return (
        f"{costs.dtype_name}, weights {costs.weights_held}: {machine.in_units(costs.weight_bytes)} besides the memory"
    )


def prepare_outputs(*files: Path | None, folders: Iterable[Path | None] = ()) -> None:
    """Make the folders of output files, before a command computes anything.

    Raises ConfigError for a file or folder that cannot be written.
    """
    for path in files:
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder")
    made = [*((path, path.parent) for path in files if path is not None), *((path, path) for path in folders if path)]
    for path, folder in made:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path | None, document: object) -> None:
    """Write a document as JSON, with paths as texts, if there is a file to write to."""
    if path is not None:
        write_whole(path, [json.dumps(document, indent=1, default=str) + "\n"])


def provenance(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a run, without the API key, and its machine, for the JSON of its figures."""
    settings = {name: value for name, value in options.items() if name != "api_key"}
    return {"settings": settings, "machine": machine.describe()}


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; gives the function that advances it."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=progress_console, transient=True, disable=not progress_console.is_terminal) as bars:
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)

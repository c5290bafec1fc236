"""`python -m papers`: the papers' figures on our data, and the page that shows them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwater.cli import run
from headwater.cli.common import prepare_outputs, show
from headwater.errors import ConfigError, TraceError
from headwater.table import Table
from papers import FIGURES, Figure, Lab, figures_named, page_of
from papers.lab import measure, write
from papers.page import given, number, verdict
from papers.results import is_kept, refuse_dirty_tree

commands = typer.Typer(add_completion=False)
NAMES = f"Figures, or papers for all of theirs (marconi); without one, all. There are {', '.join(FIGURES)}."
progress_console = Console(stderr=True)


@commands.command()
def figures(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=NAMES)] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with recorded traffic.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Folder with other simulators' results.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of a JSON file a figure: written, or read with --page.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Run nothing: write this page out of --out's files.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Let --out and --page be the project's own.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="No more sessions of a trace than that.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
) -> None:
    """Run the papers' figures on recorded traffic, and print our numbers beside the papers'."""
    chosen = figures_named(names or ())
    for written in (page, out if page is None else None):
        if written is not None and is_kept(written) and not publish:
            raise ConfigError(f"{written} is a result of the project: --publish writes it")
    prepare_outputs(page, folders=[out if page is None else None])
    if page is not None:
        page.write_text(page_of(list(FIGURES.values()), _documents(out)), encoding="utf-8")
        return
    refuse_dirty_tree(out)
    lab = Lab(data, peers, limit, jobs, seed)
    for figure in chosen:
        if figure.run is None:
            progress_console.print(f"{figure.name} needs an engine: benchmarks/ has it")
            continue
        with progress_console.status(f"{figure.name}: {figure.title}"):
            document = _measured(figure, lab)
        show(_table(figure, document))
        if out is not None:
            write(document, out)


def _measured(figure: Figure, lab: Lab) -> dict[str, Any]:
    """Run a figure. Raises TraceError for a missing trace, with a hint at --data if it was not given."""
    try:
        return measure(figure, lab)
    except TraceError as error:
        if lab.data is not None:
            raise
        raise TraceError(f"{figure.name} needs recorded traffic: say where with --data ({error})") from error


def _documents(folder: Path | None) -> dict[str, Any]:
    """Read the documents of earlier runs. Raises ConfigError without a folder."""
    if folder is None:
        raise ConfigError("--page reads figures' files: name their folder with --out")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def _table(figure: Figure, document: dict[str, Any]) -> Table:
    shapes = [f"{shape['says']}: {verdict(shape['holds'])}" for shape in document["shapes"]]
    caption = "\n".join([*shapes, f"{document['seconds']} s"])
    table = Table(f"{figure.name}: {figure.title}", (figure.paper,), ("paper", "ours"), ("",), caption=caption)
    for row in document["rows"]:
        table.add_row(row["label"], given(row["paper"]), number(row["ours"]), row["unit"])
    return table


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], commands, "python -m papers"))

"""`headwater fidelity`: distance of prompts composed of segments from the same prompts computed whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater import machine
from headwater.cli.common import HELP, Dtype, JsonFile, Model, check_writable, commands, jsonable, show, write_whole
from headwater.models.embedded import embedded
from headwater.request import Fidelity


@commands.command()
def fidelity(
    context: typer.Context,
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of JSON lines, or a text; without it, a sample.", exists=True, dir_okay=False),
    ] = None,
    cut: Annotated[
        int | None, typer.Option(min=2, help="Use one prompt: N tokens of documents, cut into equal parts.")
    ] = None,
    parts: Annotated[int, typer.Option(min=2, help="Parts of --cut; the first is kept whole.")] = 2,
    count: Annotated[int, typer.Option(min=1, help="Prompts of the sample.")] = 8,
    longest: Annotated[int, typer.Option(min=1, help="Longest prompt of the sample, in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample.")] = 0,
    ways: Annotated[
        list[Fidelity] | None,
        typer.Option("--way", help="Method of composing; may be given several times. Without it, all."),
    ] = None,
    skip_attention: Annotated[
        bool, typer.Option("--skip-attention", help="Attention layers add nothing (HYPIC, table 4).")
    ] = False,
    dtype: Dtype = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help=HELP["threads"])] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure prompts composed of segments against whole prompts.

    Prints distances of states, keys and values, and the divergence of next tokens.
    """
    from headwater.evaluate import tables
    from headwater.evaluate.fidelity_prompts import Wanted  # imports torch
    from headwater.evaluate.fidelity_study import ENDS, studied

    check_writable(json_file)
    wanted = Wanted(prompts, cut, parts, count, longest, seed)
    with Console(stderr=True).status("composing"):
        study = studied(model or embedded(), dtype, threads, wanted, ways or list(Fidelity), skip_attention)
    means = study.means
    found = (
        tables.means_table(means),
        tables.states_table(means),
        tables.kept_table(means),
        tables.deviations_table(study.deviations, ENDS),
    )
    show(*(table for table in found if table.row_count))
    if json_file is not None:
        settings = {name: jsonable(value) for name, value in context.params.items()}
        document = {"settings": settings, "machine": machine.describe(), **study.as_json()}
        write_whole(json_file, [json.dumps(document, indent=1) + "\n"])

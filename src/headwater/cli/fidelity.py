"""`headwater fidelity`: how far prompts that are composed of segments are from those computed whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater import machine
from headwater.cli.common import Dtype, Model, commands
from headwater.cli.eval_measures import show
from headwater.cli.lab_output import check_writable, write_whole
from headwater.models.embedded import embedded
from headwater.request import Fidelity


@commands.command()
def fidelity(
    context: typer.Context,
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with documents and a question, or a text with separators; else a sample.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    cut: Annotated[
        int | None, typer.Option(min=2, help="One prompt: so many tokens of documents in equal parts.")
    ] = None,
    parts: Annotated[int, typer.Option(min=2, help="Of --cut; the first is kept whole.")] = 2,
    count: Annotated[int, typer.Option(min=1, help="Prompts of the sample.")] = 8,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a prompt of the sample, at most.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    ways: Annotated[list[Fidelity] | None, typer.Option("--way", help="Several times; all, if left out.")] = None,
    skip_attention: Annotated[
        bool, typer.Option("--skip-attention", help="Attention layers add nothing, as in HYPIC's table 4.")
    ] = False,
    dtype: Dtype = "float32",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure of every prompt.")] = None,
) -> None:
    """Hold prompts composed of segments to the same computed whole: states, keys and values, next tokens."""
    from headwater.evaluate.fidelity.study import ENDS, Wanted, studied
    from headwater.evaluate.fidelity.tables import deviations_table, kept_table, states_table, ways_table

    check_writable(json_file)
    wanted = Wanted(prompts, cut, parts, count, longest, seed)
    with Console(stderr=True).status("composing"):
        study = studied(model or embedded(), dtype, threads, wanted, ways or list(Fidelity), skip_attention)
    found = study.ways
    tables = (
        ways_table(found),
        states_table(found),
        kept_table(found),
        deviations_table(study.deviations, ENDS),
    )
    show(*(table for table in tables if table.row_count))
    if json_file is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in context.params.items()}
        document = {"settings": settings, "machine": machine.describe(), **study.as_json()}
        write_whole(json_file, [json.dumps(document, indent=1) + "\n"])

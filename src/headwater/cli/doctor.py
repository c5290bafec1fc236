"""`headwater doctor`: features of this machine, whether hits are exact on it, and what to change."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text
from typer import Option

from headwater.cli.common import HELP, Memory, Model, Weights, commands, one_of, show
from headwater.cli.extras import install_commands
from headwater.cli.machine_findings import FAIL, OK, SLOW, WARN, Finding, Intended, of_machine
from headwater.cli.models import named
from headwater.config import WEIGHTS
from headwater.setting import parse_bytes
from headwater.table import Table

STYLES = {OK: "green", SLOW: "yellow", WARN: "yellow", FAIL: "bold red"}


@commands.command()
def doctor(
    model: Model = None,
    memory: Memory = "4GB",
    weights: Weights = "auto",
    rope_scaling: Annotated[str | None, Option(help=HELP["rope_scaling"])] = None,
    threads: Annotated[int | None, Option(min=1, help=HELP["threads"])] = None,
    host: Annotated[str, Option(help=HELP["host"])] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help=HELP["port"])] = 8000,
    recheck: Annotated[bool, Option("--recheck", help=HELP["recheck"])] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine can serve a model exactly.

    The exit code is 1 if any finding is a FAIL.
    """
    started = time.perf_counter()
    one_of("weights", weights, WEIGHTS)
    intended = Intended(named(model), parse_bytes(memory), threads, host, port, recheck, weights, rope_scaling)
    findings = examined(intended)
    broken = any(finding.level == FAIL for finding in findings)
    if as_json:
        report = {"ok": not broken, "seconds": round(time.perf_counter() - started, 2)}
        print(json.dumps(report | {"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(table_of(findings))
    if broken:
        raise typer.Exit(1)


def examined(intended: Intended) -> list[Finding]:
    """Examine machine and model; a torch that cannot be imported is a finding, too."""
    findings = list(of_machine(intended))
    try:
        from headwater.cli.model_findings import of_model  # imports torch, which takes a second
    except (ImportError, OSError) as error:
        return [*findings, Finding("torch", FAIL, f"cannot be imported: {error}", "\n".join(install_commands("serve")))]
    return findings + list(of_model(intended))


def table_of(findings: list[Finding]) -> Table:
    table = Table(None, ("", ""), words=("",), header=False)
    for finding in findings:
        style = STYLES[finding.level]
        value = Text.assemble(finding.value, *([(f"\n{finding.advice}", style)] if finding.advice else []))
        table.add_row(Text(finding.level, style), finding.name, value)
    return table

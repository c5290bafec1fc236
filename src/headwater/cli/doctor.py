"""`headwater doctor`: is this machine fit to serve a model, and what should be changed?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headwater.cli.common import Memory, Model, commands, console
from headwater.cli.findings import FAIL, OK, WARN, Finding, Intended, of_machine
from headwater.config import parse_bytes

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
WIDTH = 120  # of a table in a file


@commands.command()
def doctor(
    model: Model = None,
    memory: Memory = "4GB",
    threads: Annotated[int | None, typer.Option(min=1, help="As for `serve`.")] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine for serving a model; exit code 1 if something is broken."""
    started = time.perf_counter()
    intended = Intended(model, parse_bytes(memory), threads, host, port)
    findings = examined(intended)
    broken = any(finding.level == FAIL for finding in findings)
    if as_json:
        report = {"ok": not broken, "seconds": round(time.perf_counter() - started, 2)}
        print(json.dumps(report | {"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        (console if console.is_terminal else Console(width=WIDTH)).print(table_of(findings))
    if broken:
        raise typer.Exit(1)


def examined(intended: Intended) -> list[Finding]:
    """Everything that can be found out; a torch that cannot be imported is a finding too."""
    findings = list(of_machine(intended))
    try:
        from headwater.cli.model_findings import of_model  # imports torch: a second that `--help` does without
    except (ImportError, OSError) as error:
        return [*findings, Finding("torch", FAIL, f"cannot be imported: {error}", "reinstall headwater")]
    return findings + list(of_model(intended))


def table_of(findings: list[Finding]) -> Table:
    table = Table(show_header=False)
    for finding in findings:
        advice = f"\n[{STYLES[finding.level]}]{escape(finding.advice)}[/]" if finding.advice else ""
        level = f"[{STYLES[finding.level]}]{finding.level}[/]"
        table.add_row(level, escape(finding.name), escape(finding.value) + advice)
    return table

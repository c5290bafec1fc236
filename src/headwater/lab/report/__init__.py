"""The report of a lab run: one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2

from headwater import chart
from headwater.lab.report import contents, curves, lines, rows
from headwater.lab.row import Result


def write_report(path: Path, trace_name: str, model: str, notes: Sequence[str], results: Sequence[Result]) -> None:
    """Write the page about `results` to `path`: whole, or not at all.

    Raises OSError if it cannot be written.
    """
    text = render(trace_name, model, notes, results)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render(trace_name: str, model: str, notes: Sequence[str], results: Sequence[Result]) -> str:
    """Return the page's HTML. Its policy admits no script but the one in it."""
    script, icon = part("report.js"), part("icon.svg")
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            trace=trace_name,
            model=model,
            notes=notes,
            **_figures(results),
            style=part("report.css"),
            script=script,
            script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            icon=icon,
            icon_base64=base64.b64encode(icon.encode()).decode(),
        )
    )


def _figures(results: Sequence[Result]) -> dict[str, object]:
    """Return the contents of the sections; None for one without data."""
    table, named = [result.row for result in results], lines.Lines(results)
    ran = [result for result in results if result.row.requests]
    computed = [result for result in ran if result.row.prompt_tokens]
    timed = [result for result in ran if result.row.ttft_ms is not None]
    reused = [result for result in results if sum(result.reuse.values())]
    memories = {result.row.memory for result in ran}
    return {
        "lines": named,
        "rows": table,
        "columns": rows.columns(table),
        "best": rows.best_of(table),
        "tiles": rows.tiles(results, named),
        "memory_bars": curves.memory_bars(ran, named) if len(memories) == 1 else None,
        "memory_chart": curves.memory_chart(ran, named) if len(memories) > 1 else None,
        "times": curves.Times(timed, named) if timed else None,
        "lengths": curves.Lengths(computed, named) if computed else None,
        "held": contents.held_charts(results, named),
        "uses": contents.USES,
        "reasons": contents.Reasons(ran, named) if ran else None,
        "reuse": contents.Reuse(reused, named) if reused else None,
    }


def environment() -> jinja2.Environment:
    """Return the templates' environment: all values are escaped, and undefined ones raise."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(place=chart.place, grain=chart.GRAIN, count=lines.count, percent=lines.percent, size=lines.size)
    return made


def part(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

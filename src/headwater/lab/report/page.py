"""One page about one run of the lab, that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from headwater.lab.report.held import over_time
from headwater.lab.report.latency import latency
from headwater.lab.report.lengths import by_length
from headwater.lab.report.line import Lines, marks
from headwater.lab.report.markup import Markup, join, tag
from headwater.lab.report.memory_curve import curve
from headwater.lab.report.reasons import reasons
from headwater.lab.report.reuse import reuse
from headwater.lab.report.rows import table, tiles
from headwater.lab.report.words import words
from headwater.lab.row import Result

SECTIONS = (table, curve, latency, by_length, over_time, reasons, reuse)


def write_report(path: Path, trace_name: str, model: str, notes: Sequence[str], results: Sequence[Result]) -> None:
    """Write the page about `results` to `path`: whole, or not at all.

    Raises OSError where it cannot be written.
    """
    text = render(trace_name, model, notes, results)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render(trace_name: str, model: str, notes: Sequence[str], results: Sequence[Result]) -> Markup:
    """The page's HTML."""
    lines = Lines(results)
    body = tag(
        "body",
        _header(trace_name, model),
        marks(),
        tag("main", tiles(results), *(section(results, lines) for section in SECTIONS), words(notes)),
        tag("div", id="tip", role="status", hidden=True),
    )
    script = _script()
    head = _head(f"Replay of {trace_name} with {model}", lines, script)
    return join(Markup("<!doctype html>\n"), tag("html", head, "\n", body, tag("script", script), lang="en"), "\n")


def _header(trace_name: str, model: str) -> Markup:
    return tag(
        "header",
        _part("icon.svg"),
        tag("h1", "Headwater"),
        tag("span", "replay of ", tag("b", trace_name, id="trace"), " with ", tag("b", model, id="model"), id="about"),
    )


def _head(title: str, lines: Lines, script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    icon = base64.b64encode(_part("icon.svg").encode()).decode()
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href=f"data:image/svg+xml;base64,{icon}"),
        tag("style", _part("report.css"), Markup(lines.styles())),
    )


def _script() -> Markup:
    return _part("report.js")


def _part(name: str) -> Markup:
    """A file that lies beside this one, to stand in the page as it is."""
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))

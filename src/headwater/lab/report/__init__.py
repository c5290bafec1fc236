"""The report of a lab run: one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2

from headwater.chart import GRAIN, place
from headwater.lab.report.blocks import Lines, Notes, Section
from headwater.lab.report.contents import over_time, reuse
from headwater.lab.report.hit_rates import by_length, over_memory, reasons
from headwater.lab.report.latency import latency
from headwater.lab.report.rows import table, tiles
from headwater.lab.row import Result

SECTIONS = (table, over_memory, latency, by_length, over_time, reasons, reuse)
TERMS = (
    (
        "Hit rate",
        "Σ of the positions at which requests resumed ÷ Σ of their prompt tokens: the share that was not computed. "
        "With segments, composed tokens are added, and tokens computed to build segments are subtracted.",
    ),
    (
        "Ideal hit rate",
        "The same with endless memory and a checkpoint at every unit: the bound of every policy, at this order of "
        "requests. It is that of prefixes: segments may go beyond.",
    ),
    (
        "Checkpoint",
        "The states of all recurrent layers after exactly n tokens. Work can resume there, and nowhere between.",
    ),
    (
        "Stranded",
        "KV beyond the deepest checkpoint: it saves no prefill. In the table, of what requests matched; in the memory, "
        "KV with no checkpoint at or below it.",
    ),
    (
        "Placement, eviction, pool",
        "At which positions of a prefill checkpoints are taken; which page or checkpoint is evicted first; whether KV "
        "and states share one memory (unified) or have one each (split; elastic ones trade).",
    ),
    (
        "FLOPs saved",
        "Of the prefill that hits made needless, by the model's profile; the share is of all prompts' FLOPs.",
    ),
    ("Checkpoints taken, hit", "All that were saved; of them, those at which a request resumed, once or more."),
    (
        "Evicted",
        "Checkpoints and pages of KV evicted for memory. Speculative checkpoints take free pages only, and go first.",
    ),
    (
        "Composed, seam, made",
        "Tokens of stored segments that were not computed again; tokens at their ends that were recomputed; and tokens "
        "computed to build stored segments.",
    ),
    ("Private and running", "Pages of running requests alone: their states, and KV that the index does not hold."),
    (
        "TTFT",
        "From a request's arrival to its first token, by the virtual clock of the cost model. Percentiles are "
        "interpolated linearly between neighbours (type 7).",
    ),
    ("Queue", "Requests that wait to be started, averaged over time."),
    ("Tokens not hit", "Prompt tokens beyond the position at which a request resumed, summed by the request's reason."),
    ("Replay", "Processor seconds of the row, without reading and tokenising the trace."),
    ("GB", "10⁹ bytes; k and M on axes of lengths are 2¹⁰ and 2²⁰ tokens."),
)


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
    lines, script, icon = Lines(results), _part("report.js"), _part("icon.svg")
    sections = [*(section(results, lines) for section in SECTIONS)]
    sections.append(Section("notes", "Notes", "on this run", [Notes(notes, TERMS)]))
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            trace=trace_name,
            model=model,
            tiles=tiles(results),
            lines=lines.all,
            sections=sections,
            style=_part("report.css"),
            script=script,
            script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            icon=icon,
            icon_base64=base64.b64encode(icon.encode()).decode(),
        )
    )


def environment() -> jinja2.Environment:
    """Return the templates' environment: all values are escaped, and undefined ones raise."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(place=place, grain=GRAIN)
    return made


def _part(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

"""What `headwater replay` prints and writes: a table, JSON, a line a request, a report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from headwater.sim.report import write_report
from headwater.sim.row import Result, Row
from headwater.traces.request import Trace


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write when all rows are done, or as many as there are. None is not wanted."""

    trace: Trace
    model: str
    page_size: int
    json_file: Path | None
    per_request: Path | None
    report: Path | None

    def write(self, results: Sequence[Result]) -> None:
        """Each file whole, or not at all."""
        if self.json_file is not None:
            rows = [result.row.as_dict() for result in results]
            document = {"trace": self.trace.name, "model": self.model, "page_size": self.page_size, "rows": rows}
            write_whole(self.json_file, [json.dumps(document, indent=1) + "\n"])
        if self.per_request is not None:
            write_whole(self.per_request, _lines(results))
        if self.report is not None:
            write_report(self.report, self.trace.name, self.model, self.trace.notes, results)


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write a file beside `path` and put it in its place."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def results_table(trace: Trace, model: str, results: Sequence[Result]) -> Table:
    """A row each, in the order in which they were asked for."""
    timed = any(result.row.ttft_ms is not None for result in results)
    table = Table(title=f"{trace.name}, {model}", title_justify="left", caption="\n".join(trace.notes) or None)
    table.caption_justify = "left"
    for name in ("memory", "pool", "placement", "eviction"):
        table.add_column(name, no_wrap=name == "memory", overflow="fold")
    columns = ["hit rate", "of ideal", "FLOPs saved", "stranded", "taken", "reused", "evicted"]
    columns += ["TTFT p50", "p95", "queue"] if timed else []
    for name in (*columns, "seconds"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*_cells(result.row, timed))
    return table


def _cells(row: Row, timed: bool) -> list[str]:
    alpha = "" if row.alpha is None else f" α={row.alpha:g}"
    cells = [f"{row.memory / 1e9:,.4g} GB", row.pool, row.placement, row.eviction + alpha]
    ideal = row.token_hit_rate / row.ideal_hit_rate if row.ideal_hit_rate else 1.0
    cells += [f"{row.token_hit_rate:.1%}", f"{ideal:.1%}", f"{row.flops_saved_share:.1%}"]
    cells += [_short(n) for n in (row.stranded_tokens, row.checkpoints_taken, row.checkpoints_hit)]
    cells.append(_short(sum(row.evictions.values())))
    if timed:
        ttft = row.ttft_ms
        cells += ["", ""] if ttft is None else [f"{ttft.p50:,.0f} ms", f"{ttft.p95:,.0f} ms"]
        cells.append("" if row.queue_depth is None else f"{row.queue_depth:.2f}")
    return [*cells, f"{row.seconds:.1f}"]


def _short(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 10_000_000 else f"{number:,}"


def _lines(results: Sequence[Result]) -> Iterable[str]:
    for result in results:
        row = result.row
        setup = {"memory": row.memory, "pool": row.pool, "placement": row.placement, "eviction": row.eviction}
        for outcome in result.outcomes:
            yield json.dumps({**setup, **outcome.as_dict()}) + "\n"

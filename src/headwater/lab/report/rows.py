"""The table of rows, and the few figures above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.lab.report.lines import Lines, count, milliseconds, percent, short, size
from headwater.lab.row import Result, Row

BOUND = "clairvoyant"  # knows the future: a bound, never the best choice


def _exact(share: float) -> str:
    return percent(share, 2)


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _thousands(value: float) -> str:
    return f"{value:,.1f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: the path of its value in a row, and the format of numbers."""

    name: str
    path: str
    write: Callable[[float], str] = count
    about: str = ""

    def of(self, row: Row) -> float | str | None:
        value: Any = row
        for name in self.path.split("."):
            value = value.get(name, 0) if isinstance(value, dict) else getattr(value, name, None)
        return value  # type: ignore[no-any-return]


COLUMNS = (
    Column("Memory", "memory", size),
    Column("Placement", "placement"),
    Column("Eviction", "eviction"),
    Column("Pool", "pool"),
    Column("Reuse", "segments.name"),
    Column("Hit rate", "token_hit_rate", _exact, "prompt tokens that were not computed"),
    Column("Ideal", "ideal_hit_rate", _exact, "with endless memory and a checkpoint at every unit"),
    Column("Reported", "reported_hit_rate", _exact, "by the recording's own provider"),
    Column("FLOPs saved", "flops_saved_share", _exact, "of the FLOPs of all prompts"),
    *(Column(f"TTFT {name}, ms", f"ttft_ms.{name}", _thousands) for name in ("mean", "p5", "p50", "p95", "p99")),
    Column("Queue", "queue_depth", _plain, "requests that wait, on average"),
    Column("Requests", "requests"),
    Column("Prompt tokens", "prompt_tokens"),
    Column("Hit tokens", "hit_tokens"),
    Column("Stranded tokens", "stranded_tokens"),
    Column(
        "Recomputed below a page",
        "recomputed_tokens",
        about="prompt tokens that were sent before, in the page where prompts part",
    ),
    Column("FLOPs", "flops_saved", short, "that hits saved"),
    Column("Checkpoints taken", "checkpoints_taken"),
    Column("Checkpoints hit", "checkpoints_hit"),
    Column("Prefix tokens", "segments.prefix_tokens", about="at which requests resumed"),
    Column("Composed tokens", "segments.composed_tokens", about="of stored segments, not computed"),
    Column("Seam tokens", "segments.seam_tokens", about="of those segments, recomputed"),
    Column("Made tokens", "segments.made_tokens", about="computed to build stored segments"),
    Column("Segment uses", "segments.uses", about="how often a request was composed of one"),
    Column("Segments stored", "segments.stored", about="at the end"),
    Column("Segments' memory", "segments.bytes", size, "at the end"),
)
RUN = (
    Column("α", "alpha", _plain, "of a FLOP-aware policy, at the end"),
    Column("Replay, s", "seconds", _plain, "without reading and tokenising"),
    Column("Peak RSS, MB", "peak_rss_mb", _plain),
)


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that have a value in at least one row."""
    kinds = sorted({kind for row in rows for kind in row.evictions})
    evicted = [Column(f"Evicted: {kind.replace('_', ' ')}", f"evictions.{kind}") for kind in kinds]
    found = [*COLUMNS, *evicted, *RUN]
    return [column for column in found if any(column.of(row) is not None for row in rows)]


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the highest hit rate of their memory size, bounds apart."""
    most: dict[int, float] = {}
    able = [row for row in rows if not row.eviction.startswith(BOUND)]
    for row in able:
        most[row.memory] = max(most.get(row.memory, 0.0), row.token_hit_rate)
    return [row for row in able if row.token_hit_rate == most[row.memory] > 0]


def tiles(results: Sequence[Result], lines: Lines) -> list[tuple[str, str, str]]:
    """Return the run in a few figures: (name, value, explanation)."""
    rows = [result.row for result in results]
    if not rows:
        return []
    able = [row for row in rows if not row.eviction.startswith(BOUND)] or rows
    best = max(able, key=lambda row: (row.token_hit_rate, -row.memory))
    ideal = max(row.ideal_hit_rate for row in rows)
    shown = [
        ("Best hit rate", percent(best.token_hit_rate), lines.title(best)),
        ("Ideal hit rate", percent(ideal), "endless memory, a checkpoint at every unit"),
        ("Share of the ideal", percent(best.token_hit_rate / ideal, 0) if ideal else "–", "reached by the best row"),
        ("FLOPs saved", percent(best.flops_saved_share), "of all prompts, by the best row"),
    ]
    timed = [(row.ttft_ms.p95, row) for row in able if row.ttft_ms is not None]
    if timed:
        p95, fastest = min(timed, key=lambda pair: pair[0])
        shown.append(("Best p95 of TTFT", milliseconds(p95), lines.title(fastest)))
    return [*shown, ("Requests", count(rows[0].requests), f"{short(rows[0].prompt_tokens)} prompt tokens a row")]

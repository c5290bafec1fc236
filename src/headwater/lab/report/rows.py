"""The table of rows, and the few figures above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.lab.report.blocks import Cell, Empty, Lines, Section, Table, reuse_of
from headwater.lab.report.numbers import count, milliseconds, percent, short, size
from headwater.lab.row import Result, Row

BOUND = "clairvoyant"  # knows the future: a bound, never the best choice
Value = float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its value of a row, and the format of numbers."""

    name: str
    of: Callable[[Row], Value]
    write: Callable[[float], str] = count
    about: str = ""


def best_of(rows: Sequence[Row]) -> frozenset[int]:
    """Return the numbers of the rows with the highest hit rate of their memory size, bounds apart."""
    most: dict[int, float] = {}
    able = [(number, row) for number, row in enumerate(rows) if not row.eviction.startswith(BOUND)]
    for _, row in able:
        most[row.memory] = max(most.get(row.memory, 0.0), row.token_hit_rate)
    return frozenset(number for number, row in able if row.token_hit_rate == most[row.memory] > 0)


def tiles(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Return the run in a few figures: (name, value, explanation)."""
    rows = [result.row for result in results]
    if not rows:
        return []
    able = [row for row in rows if not row.eviction.startswith(BOUND)] or rows
    best = max(able, key=lambda row: (row.token_hit_rate, -row.memory))
    ideal = max(row.ideal_hit_rate for row in rows)
    shown = [
        ("Best hit rate", percent(best.token_hit_rate), Lines(results).title(best)),
        ("Ideal hit rate", percent(ideal), "endless memory, a checkpoint at every unit"),
        ("Of the ideal", percent(best.token_hit_rate / ideal, 0) if ideal else "–", "reached by the best row"),
        ("FLOPs saved", percent(best.flops_saved_share), "of all prompts, by the best row"),
    ]
    timed = [row for row in able if row.ttft_ms is not None]
    if timed:
        fast = min(timed, key=lambda row: row.ttft_ms.p95 if row.ttft_ms else 0.0)
        assert fast.ttft_ms is not None
        shown.append(("Best p95 of TTFT", milliseconds(fast.ttft_ms.p95), Lines(results).title(fast)))
    return [*shown, ("Requests", count(rows[0].requests), f"{short(rows[0].prompt_tokens)} prompt tokens a row")]


def table(results: Sequence[Result], lines: Lines) -> Section:
    """Return all rows in their given order; a script sorts them."""
    rows = [result.row for result in results]
    if not rows:
        return Section("rows", "Rows", "", [Empty("No row was run to its end.")])
    columns, best = _columns(rows), best_of(rows)
    heads = [(column.name, column.about, not isinstance(column.of(rows[0]), str)) for column in columns]
    body = [
        (number in best, [_cell(column, row, lines, number in best) for column in columns])
        for number, row in enumerate(rows)
    ]
    about = "★ the highest hit rate of its memory; bounds that know the future apart"
    return Section("rows", "Rows", about, [Table(heads, body)])


def _cell(column: Column, row: Row, lines: Lines, best: bool) -> Cell:
    value = column.of(row)
    if value is None:
        return Cell("–")
    if isinstance(value, str):
        return Cell(value, is_text=bool(value), line=lines.of(row) if column.name == "Placement" else None)
    return Cell(column.write(value), value, star=best and column.name == "Hit rate")


def _segments() -> list[Column]:
    columns = [
        ("Prefix tokens", "prefix_tokens", "at which requests resumed"),
        ("Composed tokens", "composed_tokens", "of stored segments, not computed"),
        ("Seam tokens", "seam_tokens", "of those segments, recomputed"),
        ("Made tokens", "made_tokens", "computed to build stored segments"),
        ("Segment uses", "uses", "how often a request was composed of one"),
        ("Segments stored", "stored", "at the end"),
    ]
    memory = Column("Segments' memory", _of_segments("bytes"), size, "at the end")
    return [*(Column(name, _of_segments(field), about=about) for name, field, about in columns), memory]


def _of_segments(field: str) -> Callable[[Row], Value]:
    return lambda row: None if row.segments is None else getattr(row.segments, field)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that have a value in at least one row."""
    kinds = sorted({kind for row in rows for kind in row.evictions})
    columns = [
        Column("Memory", lambda row: row.memory, size),
        Column("Placement", lambda row: row.placement),
        Column("Eviction", lambda row: row.eviction),
        Column("Pool", lambda row: row.pool),
        Column("Reuse", lambda row: reuse_of(row) or None),
        Column("Hit rate", lambda row: row.token_hit_rate, _exact, "prompt tokens that were not computed"),
        Column("Ideal", lambda row: row.ideal_hit_rate, _exact, "with endless memory and a checkpoint at every unit"),
        Column("FLOPs saved", lambda row: row.flops_saved_share, _exact, "of the FLOPs of all prompts"),
        *_times(),
        Column("Requests", lambda row: row.requests),
        Column("Prompt tokens", lambda row: row.prompt_tokens),
        Column("Hit tokens", lambda row: row.hit_tokens),
        Column("Stranded tokens", lambda row: row.stranded_tokens),
        Column("FLOPs", lambda row: row.flops_saved, short, "that hits saved"),
        Column("Checkpoints taken", lambda row: row.checkpoints_taken),
        Column("Checkpoints hit", lambda row: row.checkpoints_hit),
        *_segments(),
        *(_evictions(kind) for kind in kinds),
        Column("α", lambda row: row.alpha, _plain, "of a FLOP-aware policy, at the end"),
        Column("Replay, s", lambda row: row.seconds, _plain, "without reading and tokenising"),
        Column("Peak RSS, MB", lambda row: row.peak_rss_mb, _plain),
    ]
    return [column for column in columns if any(column.of(row) is not None for row in rows)]


def _times() -> list[Column]:
    def of(name: str) -> Callable[[Row], Value]:
        return lambda row: None if row.ttft_ms is None else getattr(row.ttft_ms, name)

    spread = [Column(f"TTFT {name}, ms", of(name), _thousands) for name in ("mean", "p5", "p50", "p95", "p99")]
    return [*spread, Column("Queue", lambda row: row.queue_depth, _plain, "requests that wait, on average")]


def _evictions(kind: str) -> Column:
    return Column(f"Evicted: {kind.replace('_', ' ')}", lambda row: row.evictions.get(kind, 0))


def _exact(share: float) -> str:
    return percent(share, 2)


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _thousands(value: float) -> str:
    return f"{value:,.1f}"

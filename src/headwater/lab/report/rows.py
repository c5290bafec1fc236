"""The table of rows, and the few figures that stand above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.lab.report.line import Lines, reuse_of, swatch
from headwater.lab.report.markup import Child, Markup, tag
from headwater.lab.report.numbers import count, milliseconds, percent, short, size
from headwater.lab.report.section import empty, section
from headwater.lab.row import Result, Row

BOUND = "clairvoyant"  # knows the future, so it is nobody's best choice
Value = float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    of: Callable[[Row], Value]
    write: Callable[[float], str] = count
    about: str = ""


def best_of(rows: Sequence[Row]) -> frozenset[int]:
    """Numbers of the rows with the highest hit rate of their memory, bounds apart."""
    most: dict[int, float] = {}
    able = [(number, row) for number, row in enumerate(rows) if not row.eviction.startswith(BOUND)]
    for _, row in able:
        most[row.memory] = max(most.get(row.memory, 0.0), row.token_hit_rate)
    return frozenset(number for number, row in able if row.token_hit_rate == most[row.memory] > 0)


def tiles(results: Sequence[Result]) -> Markup:
    """The run in five figures."""
    rows = [result.row for result in results]
    if not rows:
        return Markup("")
    able = [row for row in rows if not row.eviction.startswith(BOUND)] or rows
    best = max(able, key=lambda row: (row.token_hit_rate, -row.memory))
    ideal = max(row.ideal_hit_rate for row in rows)
    shown = [
        ("Best hit rate", percent(best.token_hit_rate), Lines(results).title(best)),
        ("Ideal hit rate", percent(ideal), "endless memory, a checkpoint at every unit"),
        ("Of the ideal", percent(best.token_hit_rate / ideal, 0) if ideal else "–", "what the best row reaches"),
        ("FLOPs saved", percent(best.flops_saved_share), "of all prompts, by the best row"),
    ]
    timed = [row for row in able if row.ttft_ms is not None]
    if timed:
        fast = min(timed, key=lambda row: row.ttft_ms.p95 if row.ttft_ms else 0.0)
        assert fast.ttft_ms is not None
        shown.append(("Best p95 of TTFT", milliseconds(fast.ttft_ms.p95), Lines(results).title(fast)))
    shown.append(("Requests", count(rows[0].requests), f"{short(rows[0].prompt_tokens)} prompt tokens a row"))
    cells = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", about, class_="note")) for name, value, about in shown
    ]
    return tag("dl", cells, id="tiles", aria_label="The run in a few figures")


def table(results: Sequence[Result], lines: Lines) -> Markup:
    """All rows, as they were given; a script lets one sort them."""
    rows = [result.row for result in results]
    if not rows:
        return section("rows", "Rows", "", empty("No row was run to its end."))
    columns, best = _columns(rows), best_of(rows)
    head = tag("tr", map(_head, columns, (column.of(rows[0]) for column in columns)))
    body = (
        tag("tr", _cells(columns, row, lines, number in best), class_="best" if number in best else None)
        for number, row in enumerate(rows)
    )
    scroll = tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", body), class_="sortable"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_labelledby="rows-title",
    )
    return section("rows", "Rows", "★ the highest hit rate of its memory; bounds that know the future apart", scroll)


def _head(column: Column, value: Value) -> Markup:
    align = None if isinstance(value, str) else "number"
    return tag("th", column.name, scope="col", title=column.about or None, class_=align)


def _cells(columns: Sequence[Column], row: Row, lines: Lines, best: bool) -> list[Markup]:
    cells = []
    for column in columns:
        value = column.of(row)
        if value is None or isinstance(value, str):
            text: list[Child] = [swatch(lines.of(row))] if column.name == "Placement" else []
            cells.append(tag("td", *text, "–" if value is None else value, class_=None if value else "number"))
            continue
        star = tag("b", "★", role="img", aria_label="best of its memory") if best and column.name == "Hit rate" else ""
        cells.append(tag("td", star, tag("data", column.write(value), value=value), class_="number"))
    return cells


def _segments() -> list[Column]:
    columns = [
        ("Prefix tokens", "prefix_tokens", "at which requests resumed"),
        ("Composed tokens", "composed_tokens", "of stored segments, not computed"),
        ("Seam tokens", "seam_tokens", "of those segments, computed anew"),
        ("Made tokens", "made_tokens", "computed so that segments are stored"),
        ("Segment uses", "uses", "how often a request was composed of one"),
        ("Segments stored", "stored", "at the end"),
    ]
    memory = Column("Segments' memory", _of_segments("bytes"), size, "at the end")
    return [*(Column(name, _of_segments(field), about=about) for name, field, about in columns), memory]


def _of_segments(field: str) -> Callable[[Row], Value]:
    return lambda row: None if row.segments is None else getattr(row.segments, field)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Those that say something of one of the rows."""
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

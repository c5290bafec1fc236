"""Tables of `headwater replay`: a row for each setup, and for a simulated cluster predictions and workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.cli import common
from headwater.lab.row import Result, Routing, Row
from headwater.models.profiles import Profile
from headwater.setting import OFF
from headwater.table import Table
from headwater.traces.request import Trace


def results_table(trace: Trace, profile: Profile, results: Sequence[Result]) -> Table:
    """Return a row for each result in the order of the options, with the reader's inferences as a caption."""
    rows = [result.row for result in results]
    caption = "\n".join((*notes(trace, results), common.formats_line(profile)))
    return _table(f"{trace.name}, {profile.name}", rows, FIGURES, caption)


def notes(trace: Trace, results: Sequence[Result]) -> tuple[str, ...]:
    """Return the reader's inferences, and why requests did not resume in mid-page although they could have."""
    off = trace.block_tokens > 1 and results and not any(result.row.tails for result in results)
    return (*trace.notes, f"tails off: recorded in blocks of {trace.block_tokens}") if off else trace.notes


def cluster_tables(results: Sequence[Result]) -> list[Table]:
    """Return the workers and predictions of each row that has a cluster; none without such a row."""
    rows = [result.row for result in results if result.row.cluster is not None]
    if not rows:
        return []
    first = _cluster(rows[0])
    title = f"{len(first.workers) - first.replaced} simulated workers, and requests by the prediction of cached tokens"
    return [_table(title, rows, ROUTED)]


def as_predicted(routing: Routing) -> float:
    """Return the share of requests of which the worker had as much cached as predicted."""
    return routing.as_predicted / max(1, routing.as_predicted + routing.more + routing.less)


def _cluster(row: Row) -> Routing:
    assert row.cluster is not None, f"a row of one server: {row}"
    return row.cluster


def _table(title: str, rows: Sequence[Row], figures: Sequence[Column], caption: str = "") -> Table:
    """Return a row of figures for each row, behind the labels in which rows may differ."""
    labels, shown = ([column for column in some if column.shown(rows)] for some in (LABELS, figures))
    table = Table(title, *([column.name for column in some] for some in (labels, shown)), caption=caption)
    for row in rows:
        table.add_row(*(column.cell(row) for column in (*labels, *shown)))
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, and whether any row has its figure."""

    name: str
    cell: Callable[[Row], str]
    shown: Callable[[Sequence[Row]], bool] = lambda rows: True


def _any(has: Callable[[Row], object]) -> Callable[[Sequence[Row]], bool]:
    """Return a function that returns whether `has` is true of any row."""
    return lambda rows: any(map(has, rows))


_timed = _any(lambda row: row.ttft_ms)
_of_segments = _any(lambda row: row.segments)
_pulls = _any(lambda row: row.cluster and row.cluster.network != OFF)
_prefill = _any(lambda row: row.cluster and row.cluster.prefill)
_failures = _any(lambda row: row.cluster and row.cluster.failures != OFF)


FOLDER = re.compile(r"^.*/(?=[^/]+\.py:)")  # of a policy's file


def _policy(row: Row) -> str:
    alpha = "" if row.alpha is None else f" α={row.alpha:g}"
    eviction = FOLDER.sub("", row.eviction)
    return f"{row.placement} / {eviction}{alpha}" if eviction != "none" else "no cache"


def _of_ideal(row: Row) -> str:
    return f"{row.token_hit_rate / row.ideal_hit_rate:.1%}" if row.ideal_hit_rate else ""


def _ttft(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.ttft_ms is None else f"{getattr(row.ttft_ms, name):,.0f}"


def _share(name: str) -> Column:
    """Return a column with the share of that kind of tokens in all prompt tokens."""

    def cell(row: Row) -> str:
        tokens = 0 if row.segments is None else getattr(row.segments, f"{name}_tokens")
        return f"{tokens / max(1, row.prompt_tokens):.1%}"

    return Column(name, cell, _of_segments)


LABELS = (
    Column("GB", lambda row: f"{row.memory / 1e9:,.4g}"),
    Column("pool", lambda row: row.pool, _any(lambda row: row.pool != "unified")),
    Column("policy", _policy),
    Column("reuse", lambda row: row.reuse, _of_segments),
    Column("tier", lambda row: row.tier, _any(lambda row: row.tier != OFF)),
    Column("tails", lambda row: "on" if row.tails else OFF, lambda rows: len({row.tails for row in rows}) > 1),
    Column("hints", lambda row: row.hints, _any(lambda row: row.hints != OFF)),
    Column("drafts", lambda row: row.speculation, _any(lambda row: row.speculation != OFF)),
    Column("router", lambda row: row.cluster.router if row.cluster else "", lambda rows: rows[0].cluster is not None),
    Column("pulls", lambda row: row.cluster.network if row.cluster else "", _pulls),
    Column("prefill", lambda row: f"{_cluster(row).prefill}", _prefill),
    Column("failures", lambda row: _cluster(row).failures, _failures),
)
FIGURES = (
    Column("hits", lambda row: f"{row.token_hit_rate:.1%}"),
    Column(
        "of high",
        lambda row: "" if row.high_hit_rate is None else f"{row.high_hit_rate:.1%}",
        _any(lambda row: row.high_hit_rate is not None),
    ),
    Column(
        "loaded",
        lambda row: f"{row.loaded_tokens / max(1, row.prompt_tokens):.1%}",
        _any(lambda row: row.tier != OFF or (row.cluster and row.cluster.network != OFF)),
    ),
    Column(
        "reported",
        lambda row: "" if row.reported_hit_rate is None else f"{row.reported_hit_rate:.1%}",
        _any(lambda row: row.reported_hit_rate is not None),
    ),
    Column("of ideal", _of_ideal, lambda rows: not _of_segments(rows)),
    *map(_share, ("prefix", "composed", "seam", "made")),
    Column("TTFT", _ttft("p50"), _timed),
    Column("p95", _ttft("p95"), _timed),
    Column(
        "a token",
        lambda row: "" if row.tpot_ms is None else f"{row.tpot_ms.p50:,.1f}",
        _any(lambda row: row.speculation != OFF or (row.cluster and row.cluster.prefill)),
    ),
    Column("its p95", lambda row: "" if row.tpot_ms is None else f"{row.tpot_ms.p95:,.1f}", _prefill),
    Column("queue", lambda row: "" if row.queue_depth is None else f"{row.queue_depth:.2f}", _timed),
    Column("FLOPs", lambda row: f"{row.flops_saved_share:.1%}"),
    Column("reused", lambda row: f"{_short(row.checkpoints_hit)} of {_short(row.checkpoints_taken)}"),
    Column("recomputed", lambda row: _short(row.recomputed_tokens), _any(lambda row: row.recomputed_tokens)),
    Column("stranded", lambda row: _short(row.stranded_tokens)),
    Column("run time", lambda row: f"{row.seconds:.1f} s"),
)
ROUTED = (
    Column("requests a worker", lambda row: _range(row, "requests", ",")),
    Column("hits a worker", lambda row: _range(row, "token_hit_rate", ".1%")),
    Column("pulled", lambda row: f"{_cluster(row).pulled:,}", _pulls),
    Column("handed over", lambda row: f"{_cluster(row).handed_over:,}", _prefill),
    Column("failed", lambda row: f"{_cluster(row).failed:,}", _failures),
    Column("resumed", lambda row: f"{_cluster(row).resumed:,}", _failures),
    Column("moved", lambda row: f"{_cluster(row).moved:,}", _failures),
    Column("given up", lambda row: f"{_cluster(row).given_up:,}", _failures),
    Column("as predicted", lambda row: f"{as_predicted(_cluster(row)):.2%}"),
    Column("more", lambda row: f"{_cluster(row).more:,}"),
    Column("less", lambda row: f"{_cluster(row).less:,}"),
    Column("lost", lambda row: f"{_cluster(row).lost_waiting:,}"),
    Column("gained", lambda row: f"{_cluster(row).gained_waiting:,}"),
)


def _range(row: Row, figure: str, form: str) -> str:
    """Format the minimum and the maximum of a figure of the workers, or the only one."""
    found = [getattr(worker, figure) for worker in _cluster(row).workers]
    return "-".join(dict.fromkeys(format(end, form) for end in (min(found), max(found))))


def _short(number: int) -> str:
    """Format a number in at most five characters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)

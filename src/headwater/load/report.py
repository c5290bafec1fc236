"""Reports of a run: a progress bar, tables, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.load.results import OUTCOMES, PERCENTS, Distribution, Result, Slo, Summary
from headwater.load.scenario import Phase

DIGITS = 6  # of seconds in a report
MOST_ERRORS = 5  # messages of a table


class LiveProgress:
    """A progress bar with counts and rates so far, on a terminal only."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TextColumn("{task.fields[counts]}"), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._reset()

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def phase(self, name: str, requests: int | None) -> None:
        self._reset()
        self._task = self._progress.add_task(name, total=requests, counts="")

    def result(self, result: Result) -> None:
        self._counts[result.outcome] += 1
        self._tokens += result.output_tokens or 0
        if result.cached_tokens is not None:
            self._cached += result.cached_tokens
            self._prompts += result.prompt_tokens or 0
        assert self._task is not None
        self._progress.update(self._task, advance=1, counts=self._shown(result.ended))

    def _reset(self) -> None:
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._tokens = self._cached = self._prompts = 0

    def _shown(self, now: float) -> str:
        counts = " ".join(f"{name} {n:,}" for name, n in self._counts.items() if n)
        hits = f", hits {self._cached / self._prompts:.0%}" if self._prompts else ""
        return f"{counts}, {self._tokens / max(now, 1e-9):,.0f} tok/s{hits}"


def as_json(phases: Iterable[Phase], slo: Slo, **about: Any) -> dict[str, Any]:
    """Return `about`, and for each phase its summary and a row for each request."""
    return {
        **about,
        "slo": asdict(slo),
        "phases": [
            {
                "name": phase.name,
                "pace": phase.pace,
                "summary": asdict(Summary.of(phase.results, slo)),
                "tenants": {tenant: asdict(summary) for tenant, summary in by_tenant(phase.results, slo).items()},
                "rows": [row(result) for result in phase.results],
            }
            for phase in phases
        ],
    }


def row(result: Result) -> dict[str, Any]:
    values = asdict(result) | {"ttft_from_due": result.ttft_from_due, "latency": result.latency}
    values["gaps"] = [round(gap, DIGITS) for gap in result.gaps]
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}


def by_tenant(results: list[Result], slo: Slo) -> dict[str, Summary]:
    """Summarise each tenant; returns {} for a single one."""
    tenants = sorted({result.tenant for result in results})
    return {t: Summary.of([r for r in results if r.tenant == t], slo) for t in tenants} if len(tenants) > 1 else {}


def phase_tables(phase: Phase, slo: Slo) -> list[Table]:
    summary = Summary.of(phase.results, slo)
    tables = [counts_table(phase, summary, slo), times_table(summary)]
    tenants = by_tenant(phase.results, slo)
    return [*tables, comparison_table("tenant", tenants)] if tenants else tables


def counts_table(phase: Phase, summary: Summary, slo: Slo) -> Table:
    table = Table(title=f"{phase.name}: {phase.pace}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    counts = ", ".join(f"{n:,} {name}" for name, n in summary.outcomes.items())
    table.add_row("requests", f"{summary.requests:,} in {summary.wall:.1f} s: {counts}")
    table.add_row(
        "answered", f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:,.1f} output tok/s"
    )
    within = f"first token within {slo.ttft:g} s of being due, then {slo.itl:g} s a token"
    table.add_row("goodput", f"{summary.goodput_per_s:.2f} requests/s ({summary.good:,}: {within})")
    table.add_row("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out")
    hits = "not reported by the server"
    if summary.hit_rate is not None:
        hits = f"{summary.hit_rate:.1%} ({summary.cached_tokens:,} tokens)"
    table.add_row("cached", hits)
    if summary.reasons:
        table.add_row("resumed", ", ".join(f"{name} {n:,}" for name, n in sorted(summary.reasons.items())))
    for message, n in sorted(summary.errors.items(), key=lambda item: -item[1])[:MOST_ERRORS]:
        table.add_row(f"{n:,} x", message)
    return table


def times_table(summary: Summary) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("mean", *(f"p{percent}" for percent in PERCENTS), "max", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {
        "first token, from sending": summary.ttft,
        "first token, from when due": summary.ttft_from_due,
        "between tokens": summary.itl,
        "whole answer": summary.latency,
        "sent late": summary.sent_late,
    }
    for name, times in rows.items():
        if times is not None:
            table.add_row(name, *milliseconds(times), f"{times.count:,}")
    return table


def milliseconds(times: Distribution) -> list[str]:
    return [f"{1000 * value:,.1f}" for value in (times.mean, times.p50, times.p90, times.p95, times.p99, times.max)]


def comparison_table(what: str, summaries: dict[str, Summary]) -> Table:
    """Return a row for each phase, or each tenant."""
    table = Table(title=f"by {what}", title_justify="left")
    columns = ("requests", "ok", "refused", "other", "ok/s", "good/s", "TTFT p50", "TTFT p99", "ITL p50", "hits")
    table.add_column(what, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        ok, refused = (summary.outcomes.get(outcome, 0) for outcome in ("ok", "refused"))
        first, gap = summary.ttft_from_due, summary.itl
        times = [f"{1000 * t:,.0f} ms" for t in (first.p50, first.p99)] if first else ["", ""]
        table.add_row(
            name, f"{summary.requests:,}", f"{ok:,}", f"{refused:,}", f"{summary.requests - ok - refused:,}",
            f"{summary.requests_per_s:.2f}", f"{summary.goodput_per_s:.2f}", *times,
            f"{1000 * gap.p50:,.0f} ms" if gap else "", "" if summary.hit_rate is None else f"{summary.hit_rate:.0%}",
        )  # fmt: skip
    return table

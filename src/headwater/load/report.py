"""Reports of a run: a progress bar, tables, JSON, and plots as PNG files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from headwater.chart import Point, rounded
from headwater.errors import ConfigError
from headwater.load.results import OUTCOMES, PERCENTS, Result, Slo, Summary
from headwater.load.scenario import Phase
from headwater.table import Table

DIGITS = 6  # of seconds in a report
MAX_ERRORS = 5  # messages of a table
MAX_PLOT_COLUMNS = 100  # over time


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
                "rows": [_row(result) for result in phase.results],
            }
            for phase in phases
        ],
    }


def _row(result: Result) -> dict[str, Any]:
    values = asdict(result) | {"ttft_from_due": result.ttft_from_due, "latency": result.latency}
    values["gaps"] = [round(gap, DIGITS) for gap in result.gaps]
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}


def by_tenant(results: list[Result], slo: Slo) -> dict[str, Summary]:
    """Summarise each tenant; returns {} for a single one."""
    tenants = sorted({result.tenant for result in results})
    return {t: Summary.of([r for r in results if r.tenant == t], slo) for t in tenants} if len(tenants) > 1 else {}


def phase_tables(phase: Phase, slo: Slo) -> list[Table]:
    """Return tables of counts and of times, and one of the tenants if there are several."""
    summary, tenants = Summary.of(phase.results, slo), by_tenant(phase.results, slo)
    tables = [_counts(phase, summary, slo), _times(summary)]
    return [*tables, comparison_table("tenant", tenants)] if tenants else tables


def _counts(phase: Phase, summary: Summary, slo: Slo) -> Table:
    table = Table(f"{phase.name}: {phase.pace}", ("",), words=("",), header=False)
    counts = ", ".join(f"{n:,} {name}" for name, n in summary.outcomes.items())
    table.add_row("requests", f"{summary.requests:,} in {summary.wall:.1f} s: {counts}")
    rates = f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:,.1f} output tok/s"
    table.add_row("answered", rates)
    within = f"first token within {slo.ttft:g} s of being due, then {slo.itl:g} s a token"
    table.add_row("goodput", f"{summary.goodput_per_s:.2f} requests/s ({summary.good:,}: {within})")
    table.add_row("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out")
    reported = summary.hit_rate is not None
    hits = f"{summary.hit_rate:.1%} ({summary.cached_tokens:,} tokens)" if reported else "not reported by the server"
    table.add_row("cached", hits)
    if summary.reasons:
        table.add_row("resumed", ", ".join(f"{name} {n:,}" for name, n in sorted(summary.reasons.items())))
    for message, n in sorted(summary.errors.items(), key=lambda item: -item[1])[:MAX_ERRORS]:
        table.add_row(f"{n:,} x", message)
    return table


def _times(summary: Summary) -> Table:
    """Return a column for each time; five of them fit next to each other."""
    measured = {
        "first token, from sending": summary.ttft,
        "first token, from when due": summary.ttft_from_due,
        "between tokens": summary.itl,
        "whole answer": summary.latency,
        "sent late": summary.sent_late,
    }
    found = {name: times for name, times in measured.items() if times is not None}
    table = Table("milliseconds", ("",), tuple(found))
    for name in ("mean", *(f"p{percent}" for percent in PERCENTS), "max"):
        table.add_row(name, *(f"{1000 * getattr(times, name):,.1f}" for times in found.values()))
    table.add_row("n", *(f"{times.count:,}" for times in found.values()))
    return table


def comparison_table(what: str, summaries: dict[str, Summary]) -> Table:
    """Return a row for each phase, or each tenant."""
    columns = ("requests", "ok", "refused", "other", "ok/s", "good/s", "TTFT p50", "TTFT p99", "ITL p50", "hits")
    table = Table(f"by {what}", (what,), columns)
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


# -- plots ---------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'headwater[plots]'") from error


def draw_plots(folder: Path, runs: dict[str, list[Result]]) -> list[Path]:
    """Write a PNG for each plot that has data, with a line or a colour for each run."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (points_of, titles, style, most) in PLOTS.items():
        points = {label: found for label, results in runs.items() if (found := points_of(results))}
        if points:
            paths.append(folder / f"{name}.png")
            _draw(points, titles, style, most, paths[-1])
    return paths


def _draw(points: dict[str, list[Point]], titles: tuple[str, str], style: str, most: float | None, path: Path) -> None:
    """Draw the points of all runs between common axes; `most` is the end of the upright one."""
    across, upward = zip(*chain(*points.values()), strict=True)
    x, y = rounded(max(across), _tick), rounded(max(upward) if most is None else most, _tick)
    canvas = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    method, options = STYLES[style]
    for label, run in points.items():
        getattr(axes, method)([x.at(a) for a, _ in run], [y.at(b) for _, b in run], label=label, **options)
    for axis, scale, title in zip((axes.xaxis, axes.yaxis), (x, y), titles, strict=True):
        axis.set_ticks([at for at, _ in scale.ticks], labels=[text for _, text in scale.ticks])
        axis.set_label_text(title)
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.savefig(path, dpi=120)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ttft_cdf(results: list[Result]) -> list[Point]:
    return _cdf(r.ttft for r in results if r.outcome == "ok")


def _itl_cdf(results: list[Result]) -> list[Point]:
    return _cdf(gap for r in results if r.outcome == "ok" for gap in r.gaps)


def _cdf(values: Iterable[float | None]) -> list[Point]:
    ascending = sorted(value for value in values if value is not None)
    return [(value, (i + 1) / len(ascending)) for i, value in enumerate(ascending)]


def _throughput(results: list[Result]) -> list[Point]:
    """Return output tokens a second over time; an answer's tokens are spread over its gaps."""
    moments: list[Point] = []  # (seconds into the run, value)
    for r in results:
        if r.ttft is None or r.output_tokens is None:
            continue
        at, share = r.sent + r.ttft, r.output_tokens / (len(r.gaps) + 1)
        moments.append((at, share))
        for gap in r.gaps:
            at += gap
            moments.append((at, share))
    return _over_time(moments, lambda values, width: sum(values) / width)


def _hit_rate(results: list[Result]) -> list[Point]:
    told = [r for r in results if r.cached_tokens is not None and r.prompt_tokens]
    moments = [(r.ended, (r.cached_tokens or 0) / (r.prompt_tokens or 1)) for r in told]
    return _over_time(moments, lambda values, width: sum(values) / len(values) if values else float("nan"))


def _over_time(moments: list[Point], merge: Callable[[list[float], float], float]) -> list[Point]:
    """Merge the values of each column of time. NaN interrupts the line."""
    if not moments:
        return []
    width = max(1.0, max(at for at, _ in moments) / MAX_PLOT_COLUMNS)
    columns: dict[int, list[float]] = {}
    for at, value in moments:
        columns.setdefault(int(at / width), []).append(value)
    return [((i + 0.5) * width, merge(columns.get(i, []), width)) for i in range(max(columns) + 1)]


def _ttft_by_length(results: list[Result]) -> list[Point]:
    return [(r.prompt_tokens, r.ttft) for r in results if r.prompt_tokens is not None and r.ttft is not None]


STYLES: dict[str, tuple[str, dict[str, Any]]] = {  # method of matplotlib's axes, and its options
    "line": ("plot", {"marker": "."}),
    "steps": ("plot", {"drawstyle": "steps-post"}),
    "dots": ("scatter", {"s": 9, "alpha": 0.6}),
}
# points of a run, titles of the axes, style, end of the upright axis
PLOTS: dict[str, tuple[Callable[[list[Result]], list[Point]], tuple[str, str], str, float | None]] = {
    "ttft_cdf": (_ttft_cdf, ("seconds to the first token", "share at most as long"), "steps", 1.0),
    "itl_cdf": (_itl_cdf, ("seconds between tokens", "share at most as long"), "steps", 1.0),
    "throughput": (_throughput, ("seconds into the run", "output tokens a second"), "line", None),
    "hit_rate": (_hit_rate, ("seconds into the run", "share of prompt tokens cached, mean of requests"), "line", 1.0),
    "ttft_by_prompt_length": (_ttft_by_length, ("prompt tokens", "seconds to the first token"), "dots", None),
}

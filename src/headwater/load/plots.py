"""Charts of a run as PNG files: distributions, rates over time, and times by prompt length."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

from headwater.chart import Point, Series, XYChart, rounded
from headwater.errors import ConfigError
from headwater.load.results import Result

SECONDS = 100  # most columns of a plot over time
Runs = dict[str, list[Result]]
Moments = list[tuple[float, float]]  # (seconds into the run, value)


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'headwater[plots]'") from error


def draw_plots(folder: Path, runs: Runs) -> list[Path]:
    """Write a PNG for each plot that has data, with a line or a colour for each run."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (points_of, x_title, y_title, style, most) in PLOTS.items():
        points = {label: points_of(results) for label, results in runs.items()}
        if any(points.values()):
            paths.append(folder / f"{name}.png")
            _write_png(_chart(points, x_title, y_title, style, most), paths[-1])
    return paths


def _chart(points: dict[str, list[Point]], x_title: str, y_title: str, style: str, most: float | None) -> XYChart:
    """Scale the points of all runs to common axes; `most` is the end of the upright one."""
    every = [point for run in points.values() for point in run]
    x = rounded(max(x for x, _ in every), _tick, x_title)
    y = rounded(max(y for _, y in every) if most is None else most, _tick, y_title)
    series = [Series(label, [(x.at(a), y.at(b)) for a, b in run], style) for label, run in points.items() if run]
    return XYChart(x, y, series)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _write_png(chart: XYChart, path: Path) -> None:
    canvas = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    for one in chart.series:
        places = list(zip(*one.points, strict=True))
        if one.style == "dots":
            axes.scatter(*places, s=9, alpha=0.6, label=one.label)
        elif one.style == "steps":
            axes.plot(*places, drawstyle="steps-post", label=one.label)
        else:
            axes.plot(*places, marker=".", label=one.label)
    for axis, scale in ((axes.xaxis, chart.x), (axes.yaxis, chart.y)):
        axis.set_ticks([at for at, _ in scale.ticks], labels=[text for _, text in scale.ticks])
        axis.set_label_text(scale.title)
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.savefig(path, dpi=120)


def _ttft_cdf(results: list[Result]) -> list[Point]:
    return _cdf(r.ttft for r in results if r.outcome == "ok")


def _itl_cdf(results: list[Result]) -> list[Point]:
    return _cdf(gap for r in results if r.outcome == "ok" for gap in r.gaps)


def _cdf(values: Iterable[float | None]) -> list[Point]:
    ascending = sorted(value for value in values if value is not None)
    return [(value, (i + 1) / len(ascending)) for i, value in enumerate(ascending)]


def _throughput(results: list[Result]) -> list[Point]:
    """Return output tokens a second over time; an answer's tokens are spread over its gaps."""
    moments: Moments = []
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


def _over_time(moments: Moments, merge: Callable[[list[float], float], float]) -> list[Point]:
    """Merge the values of each column of time. NaN interrupts the line."""
    if not moments:
        return []
    width = max(1.0, max(at for at, _ in moments) / SECONDS)
    columns: dict[int, list[float]] = {}
    for at, value in moments:
        columns.setdefault(int(at / width), []).append(value)
    return [((i + 0.5) * width, merge(columns.get(i, []), width)) for i in range(max(columns) + 1)]


def _ttft_by_length(results: list[Result]) -> list[Point]:
    return [(r.prompt_tokens, r.ttft) for r in results if r.prompt_tokens is not None and r.ttft is not None]


# points of a run, titles of the axes, style, end of the upright axis
PLOTS: dict[str, tuple[Callable[[list[Result]], list[Point]], str, str, str, float | None]] = {
    "ttft_cdf": (_ttft_cdf, "seconds to the first token", "share at most as long", "steps", 1.0),
    "itl_cdf": (_itl_cdf, "seconds between tokens", "share at most as long", "steps", 1.0),
    "throughput": (_throughput, "seconds into the run", "output tokens a second", "line", None),
    "hit_rate": (_hit_rate, "seconds into the run", "share of prompt tokens cached, mean of requests", "line", 1.0),
    "ttft_by_prompt_length": (_ttft_by_length, "prompt tokens", "seconds to the first token", "dots", None),
}

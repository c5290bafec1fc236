"""Charts of a run as PNG files: distributions, rates over time, and times by prompt length."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from headwater.chart import Point, rounded
from headwater.errors import ConfigError
from headwater.load.results import Result

SECONDS = 100  # most columns of a plot over time
Runs = dict[str, list[Result]]


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
    width = max(1.0, max(at for at, _ in moments) / SECONDS)
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

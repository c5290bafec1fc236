"""Pictures of a run: distributions, rates over time, and what prompts cost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.load.results import Result

SECONDS = 100  # columns of a plot over time, at most
Runs = dict[str, list[Result]]


def require_matplotlib() -> None:
    """Raises ConfigError if it is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'headwater[plots]'") from error


def draw_plots(folder: Path, runs: Runs) -> list[Path]:
    """Write a PNG for each plot that there is data for; one line, or colour, for each run."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in PLOTS.items():
        canvas = figure(figsize=(7, 4.5), layout="constrained")
        axes = canvas.add_subplot()
        if any([draw(axes, label, results) for label, results in runs.items()]):
            axes.grid(alpha=0.3)
            axes.legend()
            paths.append(folder / f"{name}.png")
            canvas.savefig(paths[-1], dpi=120)
    return paths


def _ttft_cdf(axes: Any, label: str, results: list[Result]) -> bool:
    return _cdf(axes, label, "seconds to the first token", (r.ttft for r in results if r.outcome == "ok"))


def _itl_cdf(axes: Any, label: str, results: list[Result]) -> bool:
    gaps = (gap for r in results if r.outcome == "ok" for gap in r.gaps)
    return _cdf(axes, label, "seconds between tokens", gaps)


def _cdf(axes: Any, label: str, unit: str, values: Iterable[float | None]) -> bool:
    ascending = sorted(value for value in values if value is not None)
    n = len(ascending)
    if n:
        axes.plot(ascending, [(i + 1) / n for i in range(n)], drawstyle="steps-post", label=label)
        axes.set(xlabel=unit, ylabel="share at most as long", ylim=(0, 1))
    return bool(n)


def _throughput(axes: Any, label: str, results: list[Result]) -> bool:
    """Output tokens by when they came: an answer's are spread over its gaps."""
    moments: list[tuple[float, float]] = []
    for r in results:
        if r.ttft is None or r.output_tokens is None:
            continue
        at, share = r.sent + r.ttft, r.output_tokens / (len(r.gaps) + 1)
        moments.append((at, share))
        for gap in r.gaps:
            at += gap
            moments.append((at, share))
    axes.set(xlabel="seconds into the run", ylabel="output tokens a second")
    return _over_time(axes, label, moments, lambda values, width: sum(values) / width)


def _hit_rate(axes: Any, label: str, results: list[Result]) -> bool:
    told = [r for r in results if r.cached_tokens is not None and r.prompt_tokens]
    moments = [(r.ended, (r.cached_tokens or 0) / (r.prompt_tokens or 1)) for r in told]
    axes.set(xlabel="seconds into the run", ylabel="share of prompt tokens cached, mean of requests", ylim=(0, 1))
    return _over_time(axes, label, moments, lambda values, width: sum(values) / len(values) if values else float("nan"))


def _over_time(
    axes: Any, label: str, moments: list[tuple[float, float]], merge: Callable[[list[float], float], float]
) -> bool:
    if not moments:
        return False
    width = max(1.0, max(at for at, _ in moments) / SECONDS)
    columns: dict[int, list[float]] = {}
    for at, value in moments:
        columns.setdefault(int(at / width), []).append(value)
    last = max(columns)
    middles = [(i + 0.5) * width for i in range(last + 1)]
    axes.plot(middles, [merge(columns.get(i, []), width) for i in range(last + 1)], marker=".", label=label)
    return True


def _ttft_by_length(axes: Any, label: str, results: list[Result]) -> bool:
    points = [(r.prompt_tokens, r.ttft) for r in results if r.prompt_tokens is not None and r.ttft is not None]
    if points:
        axes.scatter(*zip(*points, strict=True), s=9, alpha=0.6, label=label)
        axes.set(xlabel="prompt tokens", ylabel="seconds to the first token")
    return bool(points)


PLOTS: dict[str, Callable[[Any, str, list[Result]], bool]] = {
    "ttft_cdf": _ttft_cdf,
    "itl_cdf": _itl_cdf,
    "throughput": _throughput,
    "hit_rate": _hit_rate,
    "ttft_by_prompt_length": _ttft_by_length,
}

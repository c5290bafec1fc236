"""Tables and figures in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Format a table. `align` has a letter for each column, l or r; by default all are l."""
    marks = ["---:" if letter == "r" else "---" for letter in align.ljust(len(header), "l")]
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def figure(value: float) -> str:
    """Format a number with at least three significant digits: 12,345; 123; 12.3; 1.23; 0.0123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Format a median with its range: `1.02 [1.00, 1.05]`; one value as it is."""
    middle = figure(statistics.median(values))
    if len(values) == 1 or min(values) == max(values):
        return middle
    return f"{middle} [{figure(min(values))}, {figure(max(values))}]"

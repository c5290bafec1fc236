"""Where a share of values lies."""

from __future__ import annotations

from collections.abc import Sequence

BOX = (0.05, 0.25, 0.5, 0.75, 0.95)  # quartiles, and whiskers at P5 and P95


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, between two of them in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

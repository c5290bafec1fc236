"""Percentiles with linear interpolation between neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile of values in any order (Hyndman and Fan 1996, type 7).

    percent: from 0, the smallest value, to 100, the largest. Raises ValueError if there are no values.
    """
    ascending = sorted(values)
    if not ascending:
        raise ValueError("a percentile needs at least 1 value, got 0")
    at = (len(ascending) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (at - low)

"""How far a mean might lie from where it is: the percentile bootstrap (Efron 1979), over groups.

Items of a group share their documents, so groups are drawn, not items (Davison and Hinkley 1997, section 3.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.percentile import percentile

RESAMPLES = 2_000
PERCENTS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items, with its 95% interval; there is none of fewer than two groups."""

    mean: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float], groups: Sequence[int], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean of `values`, each of an item of the group beside it; for a paired difference, values are differences.

    Equal arguments give equal intervals. Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("0 values have no mean")
    _, place_N = np.unique(np.asarray(groups), return_inverse=True)
    sum_G = np.bincount(place_N, weights=np.asarray(values, np.float64))
    count_G = np.bincount(place_N)
    mean, n_groups = float(sum_G.sum() / count_G.sum()), len(count_G)
    if n_groups < 2:
        return Estimate(mean, None, None)
    rng = np.random.default_rng(seed)
    drawn_BG = rng.integers(n_groups, size=(resamples, n_groups))
    means = sorted((sum_G[drawn_BG].sum(1) / count_G[drawn_BG].sum(1)).tolist())
    low, high = (percentile(means, percent) for percent in PERCENTS)
    return Estimate(mean, low, high)

"""Savings of a set of checkpoints: the quantities of the sparse prefix caching paper, section 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.cache.positions.hull import Column

Numbers = Sequence[int] | Sequence[float] | Column


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Tokens that a request recomputes on average."""

    cost: float  # from the deepest checkpoint at or before where its overlap ends
    baseline: float  # from the beginning: E[r]

    @property
    def savings(self) -> float:
        """Normalised: 1 − E[cost] / E[r]; 0 where there is nothing to save."""
        return 1 - self.cost / self.baseline if self.baseline else 0.0

    @property
    def reduction(self) -> float:
        """The factor E[r] / E[cost]; infinite where nothing is recomputed, 1 where there is nothing to save."""
        if not self.baseline:
            return 1.0
        return self.baseline / self.cost if self.cost else math.inf


def recomputation(positions: Sequence[int], depths: Numbers, weights: Numbers | None = None) -> Recomputation:
    """Return the recomputation for requests with overlaps of `depths` tokens, weighted by count or probability."""
    at = np.asarray(depths, dtype=float)
    weight = np.ones(len(at)) if weights is None else np.asarray(weights, dtype=float)
    total = float(weight.sum())
    if not total:
        return Recomputation(0.0, 0.0)
    stops = np.array([0, *sorted(positions)], dtype=float)
    resumed = stops[np.searchsorted(stops, at, "right") - 1]
    return Recomputation(float(weight @ (at - resumed)) / total, float(weight @ at) / total)

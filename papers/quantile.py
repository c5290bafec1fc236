"""Where a share of values lies, their mean, and ratios: each says what is missing where it cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import ConfigError
from headwater.percentile import percentile

BOX = (0.05, 0.25, 0.5, 0.75, 0.95)  # quartiles, and whiskers at P5 and P95


def quantile(values: Sequence[float], share: float) -> float:
    """Return the percentile of a share between 0 and 1."""
    return percentile(_some(values), 100 * share)


def mean(values: Sequence[float]) -> float:
    return sum(_some(values)) / len(values)


def ratio(value: float, to: float) -> float:
    if not to:
        raise ConfigError(f"a figure's ratio is {value:g} to 0: too little traffic, or too little memory for it")
    return value / to


def _some(values: Sequence[float]) -> Sequence[float]:
    if not values:
        raise ConfigError("a figure has 0 requests of a kind, at least 1 is needed: too few sessions")
    return values

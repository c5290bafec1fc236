"""Endless ascending times in seconds, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Process = Callable[[float, float, random.Random], Iterator[float]]


def poisson(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average: gaps are exponential."""
    return _sums(lambda: rng.expovariate(rate))


def gamma(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Gaps are gamma distributed with coefficient of variation `cv`: 1 is Poisson, more comes in bursts."""
    return _sums(lambda: rng.gammavariate(1 / cv**2, cv**2 / rate))


def constant(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """One every 1/rate seconds."""
    return _sums(lambda: 1 / rate)


PROCESSES: dict[str, Process] = {"poisson": poisson, "gamma": gamma, "constant": constant}


def _sums(gap: Callable[[], float]) -> Iterator[float]:
    now = 0.0
    while True:
        now += gap()
        yield now

"""Marconi: FLOP-aware eviction whose alpha is found on the traffic itself."""

from __future__ import annotations

from headwater.cache.eviction.flop_aware import FlopAware
from headwater.plan import CacheLayout


class Marconi(FlopAware):
    """`flop_aware` with alpha 0 until the tuner (lab/tuner.py) sets it; alone it stays there (Marconi, section 4.2).

    multiplier: the tuner replays so many times the requests that came until the first eviction; 5 to 15 in the paper.
    guard: it keeps 0 unless the best alpha gains more than so many points of token hit rate over it. Others as there.
    """

    def __init__(self, layout: CacheLayout, multiplier: int = 5, guard: float = 0.0, **options: str) -> None:
        if multiplier < 1:
            raise ValueError(f"multiplier is {multiplier}, must be at least 1")
        super().__init__(layout, 0.0, **options)
        self.multiplier, self.guard = multiplier, guard
        self._options = options

    def static(self, alpha: float) -> str:
        """How the policy with this alpha for good is written."""
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"flop_aware({alpha}{options})"

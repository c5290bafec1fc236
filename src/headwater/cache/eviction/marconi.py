"""Marconi: FLOP-aware eviction whose alpha is found by replaying the cache's own traffic."""

from __future__ import annotations

from headwater.cache.eviction.flop_aware import FlopAware
from headwater.plan import CacheLayout


class Marconi(FlopAware):
    """`flop_aware` with alpha 0 until a tuner (schedule/tuner.py) sets it; else it stays 0 (Marconi, section 4.2).

    multiplier: the tuner replays that many times as many requests as came before the first eviction; 5 to 15 in the
    paper. guard: alpha stays 0 unless the best one gains more than that many points of token hit rate over it. The
    other options are those of `flop_aware`.
    """

    def __init__(self, layout: CacheLayout, multiplier: int = 5, guard: float = 0.0, **options: str) -> None:
        if multiplier < 1:
            raise ValueError(f"multiplier is {multiplier}, must be at least 1")
        super().__init__(layout, 0.0, **options)
        self.multiplier, self.guard = multiplier, guard
        self._options = options

    def static(self, alpha: float) -> str:
        """Return the spelling of `flop_aware` with this alpha and this policy's options."""
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"flop_aware({alpha}{options})"

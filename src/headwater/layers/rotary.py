"""Rotary position embedding: the channels of a head that rotate, and their frequencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotary:
    """The first `dim` channels of each head rotate (Su et al. 2021); pairs are (i, i + dim/2), or neighbours."""

    dim: int
    theta: float = 10_000.0
    neighbours: bool = False  # pairs are (2i, 2i + 1)

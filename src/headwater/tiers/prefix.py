"""A cached prefix as parts of tiers, by their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Name and place of a part of a prefix. Positions in units of the index."""

    name: str
    kind: str  # STATE, RUN or ENTRIES
    end: int
    start: int = 0  # of a run, and of the entries beside it
    below: str = ""  # digest of the key up to the start of a run


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that ends at a state, and its parts: the runs of KV below it, the first ones first, then the state."""

    namespace: str
    key: bytes  # of the index, up to its end
    at: int  # where it ends, in tokens
    places: Sequence[PartPlace]

    @property
    def names(self) -> list[str]:
        """Names of its parts."""
        return [place.name for place in self.places]

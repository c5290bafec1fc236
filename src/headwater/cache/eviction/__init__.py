"""What goes first: a policy a file, in a table by name."""

from __future__ import annotations

from collections.abc import Callable

from headwater.cache.eviction.lru import Lru
from headwater.cache.eviction.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.seglen import SegLen
from headwater.cache.spelling import build

EVICTION: dict[str, Callable[..., Eviction]] = {"lru": Lru, "seglen": SegLen}

__all__ = ["EVICTION", "Eviction", "Kind", "Room", "Victim", "make_eviction"]


def make_eviction(spelling: str) -> Eviction:
    """`lru`, `seglen(w=0.5)`, ...: raises ConfigError for a name that is not in the table."""
    return build("eviction", spelling, EVICTION)

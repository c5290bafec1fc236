"""What goes first: a policy a file, in a table by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.cache.eviction.flop_aware import FlopAware
from headwater.cache.eviction.lru import Lru
from headwater.cache.eviction.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.seglen import SegLen
from headwater.cache.spelling import build
from headwater.types import CacheLayout

EVICTION: dict[str, Callable[..., Eviction]] = {"lru": Lru, "seglen": SegLen, "flop_aware": FlopAware}

__all__ = ["EVICTION", "Eviction", "Kind", "Room", "Victim", "make_eviction"]


def make_eviction(spelling: str, layout: CacheLayout) -> Eviction:
    """`lru`, `seglen(w=0.5)`, ...: raises ConfigError for a name that is not in the table."""
    table = {name: partial(policy, layout) for name, policy in EVICTION.items()}
    return build("eviction", spelling, table)

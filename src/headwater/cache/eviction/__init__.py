"""What goes first: a policy a file, in a table by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.eviction.flop_aware import FlopAware
from headwater.cache.eviction.gdsf import Gdsf
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.eviction.last_n import LastN
from headwater.cache.eviction.lfu import Lfu
from headwater.cache.eviction.lru import Lru
from headwater.cache.eviction.lru_path import LruPath
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.eviction.path_cap import PathCap
from headwater.cache.eviction.policy import Eviction, Kind, Room, Victim
from headwater.cache.eviction.seglen import SegLen
from headwater.cache.spelling import build
from headwater.plan import CacheLayout

EVICTION: dict[str, Callable[..., Eviction]] = {
    "lru": Lru,
    "lru_path": LruPath,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "seglen": SegLen,
    "flop_aware": FlopAware,
    "marconi": Marconi,
    "path_cap": PathCap,
    "last_n": LastN,
    "clairvoyant": Clairvoyant,
    "headwater": Headwater,
}

__all__ = ["EVICTION", "Eviction", "Kind", "Room", "Victim", "make_eviction"]


def make_eviction(spelling: str, layout: CacheLayout) -> Eviction:
    """`lru`, `seglen(w=0.5)`, ...: raises ConfigError for a name that is not in the table."""
    table = {name: partial(policy, layout) for name, policy in EVICTION.items()}
    return build("eviction", spelling, table)

"""Eviction policies, one a file, in a table by name. What they share is in `base`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.cache.eviction.base.policy import Eviction
from headwater.cache.spelling import build, classes, own_class
from headwater.plan import CacheLayout

# file: its class. The file's name is the policy's
EVICTION: dict[str, Callable[..., Eviction]] = classes(
    __name__,
    {
        "lru": "Lru",
        "lru_path": "LruPath",
        "lfu": "Lfu",
        "gdsf": "Gdsf",
        "seglen": "SegLen",
        "flop_aware": "FlopAware",
        "marconi": "Marconi",
        "path_cap": "PathCap",
        "last_n": "LastN",
        "clairvoyant": "Clairvoyant",
        "headwater": "Headwater",
    },
)


def make_eviction(spelling: str, layout: CacheLayout) -> Eviction:
    """Build the policy that `spelling` names: `lru`, `seglen(w=0.5)`, `./mine.py:Mine`. Raises ConfigError."""
    own = own_class(spelling)
    table: dict[str, Callable[..., Eviction]] = {
        name: partial(policy, layout) for name, policy in (*EVICTION.items(), *([own] if own else []))
    }
    return build("eviction", spelling, table)

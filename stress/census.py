"""Census of the process: objects of the package by class, and the sizes of their containers.

A leak of anything, a request, an id, a namespace, shows as a number that grows with the requests.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sized
from typing import Any

CONTAINERS = (dict, list, set, deque, OrderedDict, bytearray, Counter)
PACKAGES = ("headwater", "prometheus_client")
INSTANCES = "instances"


def census() -> Counter[str]:
    """Counts by class (`Sequence: instances`), attribute (`Engine._live`: items in all of them) and global."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if _of_package(kind.__module__) and isinstance(kind, type):
            counts[f"{kind.__name__}: {INSTANCES}"] += 1
            for name, size in _containers(thing):
                counts[f"{kind.__name__}.{name}"] += size
    for name, module in list(sys.modules.items()):
        if _of_package(name):
            counts.update(_globals(name, module))
    return counts


def grown(before: Counter[str], after: Counter[str], capacities: dict[str, int], slack: int) -> dict[str, tuple]:
    """Return (before, after) of each count that grew by more than `slack` and exceeds its capacity, if it has one."""
    return {
        name: (before[name], count)
        for name, count in after.items()
        if count > before[name] + slack and count > capacities.get(name, 0)
    }


def _of_package(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in PACKAGES


def _containers(thing: Any) -> Iterator[tuple[str, int]]:
    names = set(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    for name in names:
        value = getattr(thing, name, None)
        if isinstance(value, CONTAINERS):
            yield name, len(value)


def _globals(module_name: str, module: Any) -> Iterator[tuple[str, int]] | dict[str, int]:
    found = {}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if isinstance(value, CONTAINERS) and isinstance(value, Sized):
            found[f"{module_name}:{name}"] = len(value)
        elif hasattr(value, "cache_info"):
            found[f"{module_name}:{name}()"] = value.cache_info().currsize
    return found

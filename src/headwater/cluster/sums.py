"""Sums of workers' gauges and counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from headwater.engine.meter import EngineStats
from headwater.schedule.tier_load import TierStats
from headwater.tiers.store import PEER

PULLS = ("read", "bytes_read", "corrupt", "errors", "sent", "bytes_shared", "bytes_networked")  # counters of pulls

Summed = TypeVar("Summed")


def summed(found: Sequence[Summed]) -> Summed:
    """Return the sum of dataclasses of one type, number by number; tuples are left out."""
    first = found[0]
    sums: dict[str, Any] = {}
    for one in fields(first):  # type: ignore[arg-type]
        values = [getattr(each, one.name) for each in found]
        sums[one.name] = (
            () if isinstance(values[0], tuple) else summed(values) if is_dataclass(values[0]) else sum(values)
        )
    return type(first)(**sums)


def pulls_of(found: Iterable[EngineStats]) -> tuple[TierStats, ...]:
    """Return the sums of workers' pulls, as one tier; none without any.

    Other tiers are left out: workers may share them.
    """
    peers = [tier for stats in found for tier in stats.tiers if tier.kind == PEER]
    if not peers:
        return ()
    work = {name: sum(getattr(one, name) for one in peers) for name in PULLS}
    return (replace(peers[0], **work, usable=any(one.usable for one in peers)),)


def pulled_bytes(stats: EngineStats | None) -> dict[str, int]:
    """Return the bytes that a worker has pulled, by the way that they came; none if it pulls nothing."""
    ways = (tier.pulled_by_way() for tier in (stats.tiers if stats is not None else ()))
    return next(filter(None, ways), {})


def zero(kind: type[Summed], **others: Any) -> Summed:
    """Return a dataclass of numbers, all of them 0 but `others`."""
    numbers = {one.name: 0 for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**numbers, **others})

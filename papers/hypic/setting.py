"""What the figures share: the ways of reuse, and how their rows are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.request import SegmentEviction
from headwater.traces.arrivals import Load
from headwater.traces.request import Trace
from papers.figure import Line
from papers.lab import Lab

GB = 10**9
WAYS: dict[str, dict[str, Any]] = {
    "prefix": {"reuse": "prefix"},
    "segments": {"reuse": "segments"},
    "both": {"reuse": "both"},
    "both, segments by age": {"reuse": "both", "segment_eviction": SegmentEviction.LRU},
}


@dataclass(frozen=True, slots=True)
class Model:
    """A profile, and sizes of memory from a few requests to nearly all documents, in GB."""

    name: str
    memories: tuple[float, ...]

    def setups(self, memory: float, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Setup]:
        """By way."""
        base = Setup(load_profile(self.name), int(memory * GB))
        return {way: replace(base, **WAYS[way]) for way in ways}


def rows(
    lab: Lab, trace: Trace, setups: Mapping[str, Setup], load: Load | None = None, engine: Engine | None = None
) -> dict[str, Row]:
    """By way."""
    results = lab.run(trace, list(setups.values()), load, engine)
    return {way: result.row for way, result in zip(setups, results, strict=True)}


def rates(label: str, found: dict[str, Row]) -> list[Line]:
    """What was not computed, by way."""
    return [Line(f"{label}: {way}", None, 100 * row.token_hit_rate, "% not computed") for way, row in found.items()]


def parts(label: str, row: Row) -> list[Line]:
    """What it is made of, where both are reused."""
    of = row.segments
    assert of is not None, "its requests are made of segments"
    tokens = {
        "found as prefixes": of.prefix_tokens,
        "composed": of.composed_tokens,
        "in seams": of.seam_tokens,
        "computed to make segments": of.made_tokens,
    }
    return [Line(f"{label}: {name}", None, 100 * count / row.prompt_tokens, "%") for name, count in tokens.items()]

"""Cells of the comparison of policies, as `cells.toml` lists them: traffic, a model, and a size of memory."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.setting import parse_bytes

FILE = Path(__file__).with_suffix(".toml")
OPTIONS = ("pool", "state_fraction", "page_size", "decode_reuse")  # of a Setup, where a cell differs from the others
Pair = tuple[str, str]  # placement, eviction


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace, how much of it is replayed, and its arrivals."""

    trace: str
    sessions: int | None = None  # from its beginning; None: all
    arrival: str | None = None  # None: as recorded, or interleaved

    def __str__(self) -> str:
        sessions = "" if self.sessions is None else f", {self.sessions:,} sessions"
        return f"{self.trace}{sessions}{'' if self.arrival is None else f', {self.arrival}'}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison of all policies."""

    traffic: Traffic
    model: str
    size: float  # share of the memory that reaches the ideal; 0: `memory` says how many bytes
    memory: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    request: int | None = None  # number of the request that is expected to resume at `resumed_at`; None: none is
    resumed_at: int = 0

    @property
    def name(self) -> str:
        share = f"{self.size:.0%}" if self.size else f"{self.memory / 1e9:.1f} GB"
        return f"{self.traffic}; {self.model}; {share}"

    def setup(self, pair: Pair, memory: int) -> Setup:
        return Setup(load_profile(self.model), memory, *pair, **self.options)


@dataclass(frozen=True, slots=True)
class Cells:
    """All cells of recorded and scripted traffic, the policies, and the seeds of drawn traffic."""

    ours: tuple[Pair, ...]  # the default first
    bounds: tuple[Pair, ...]
    rivals: tuple[Pair, ...]
    rivals_of_drawn: tuple[Pair, ...]  # those of drawn traffic: fewer, since there is more of it
    recorded: tuple[Cell, ...]
    models: tuple[str, ...]
    sizes: tuple[float, ...]
    requests: int  # of a drawn trace
    development: range
    final: range

    def drawn(self, seed: int, requests: int | None = None) -> Cell:
        """Return the cell of a seed, whose model and size go round with it."""
        model = self.models[seed % len(self.models)]
        size = self.sizes[seed // len(self.models) % len(self.sizes)]
        length = self.requests if requests is None else requests
        return Cell(Traffic(f"generated({seed}, requests={length})"), model, size)


def read_cells(file: Path = FILE) -> Cells:
    """Read the file of cells."""
    known = tomllib.loads(file.read_text(encoding="utf-8"))
    drawn = known["generated"]
    return Cells(
        ours=_pairs(known["ours"]),
        bounds=_pairs(known["bounds"]),
        rivals=_pairs(known["rivals"]),
        rivals_of_drawn=_pairs([group for group in known["rivals"] if group.get("drawn", True)]),
        recorded=tuple(cell for one in known["traces"] for cell in _cells(one, known)),
        models=tuple(known["models"]),
        sizes=tuple(known["sizes"]),
        requests=drawn["requests"],
        development=_seeds(drawn["development"]),
        final=_seeds(drawn["final"]),
    )


def _pairs(groups: list[dict[str, Any]]) -> tuple[Pair, ...]:
    return tuple(pair for group in groups for pair in product(group["placement"], group["eviction"]))


def _cells(one: dict[str, Any], known: dict[str, Any]) -> Iterator[Cell]:
    traffic = Traffic(one["trace"], one.get("sessions"), one.get("arrival"))
    options = {name: one[name] for name in OPTIONS if name in one}
    expected = one.get("expected", {})
    memory = parse_bytes(one["memory"]) if "memory" in one else 0
    sizes = [0.0] if memory else one.get("sizes", known["sizes"])
    for model, size in product(one.get("models", known["models"]), sizes):
        yield Cell(traffic, model, size, memory, options, **expected)


def _seeds(ends: list[int]) -> range:
    first, last = ends
    return range(first, last + 1)

"""Replays from Python: `replay(trace, policy=..., memory=...)` returns a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwater.cache.eviction import EVICTION
from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.outputs import flat, provenance, write_rows
from headwater.lab.replay import run_grid
from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import PROFILES
from headwater.setting import parse_bytes
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace

SHOWN = ("memory", "placement", "eviction", "token_hit_rate", "ideal_hit_rate", "flops_saved_share")
Policy = str | Callable[..., Any]  # a spelling, or a class of one's own


class LabTable(list[dict[str, Any]]):
    """Rows of a replay as dictionaries, whose names are the columns of `replay --out`."""

    def __init__(self, rows: Sequence[Row], run: dict[str, object]) -> None:
        super().__init__({**run, **flat(row)} for row in rows)
        self.rows, self.run = tuple(rows), run

    def write(self, path: str | Path) -> None:
        """Write the table to a file in CSV, Parquet or JSON."""
        write_rows(Path(path), self.rows, self.run)

    def __str__(self) -> str:
        lines = [SHOWN, *([_shown(row[name]) for name in SHOWN] for row in self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )


def replay(
    trace: str | Path | Trace,
    policy: Policy | Sequence[Policy] = "headwater",
    memory: str | int | Sequence[str | int] = "20GB",
    *,
    placement: str = "headwater",
    model: str = "qwen3.5-9b",
    page_size: int = 64,
    serve: str | None = None,
    arrival: str | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
    seed: int = 0,
    jobs: int = 1,
) -> LabTable:
    """Replay a trace under each policy and memory, as `headwater replay` does, and return a row for each.

    trace: a file, a folder, a name below `data`, drawn traffic, or a Trace. policy: a spelling such as "lru" or
    "./mine.py:Mine(floor=4096)", or an eviction class. serve: a device, for queues and times. jobs: processes.
    Raises ConfigError for options that cannot be, TraceError for a malformed file.
    """
    if model not in PROFILES:
        raise ConfigError(f"model is {model!r}, must be one of {', '.join(PROFILES)}")
    where = None if data is None else Path(data)
    found = trace if isinstance(trace, Trace) else make_trace(str(trace), where, limit=limit, seed=seed)
    profile = PROFILES[model]
    engine = None if serve is None else Engine(StepCost(profile, load_device(serve)), seed=seed)
    setups = [
        Setup(profile, size, placement, _spelling(one), page_size=page_size)
        for size in (parse_bytes(one) if isinstance(one, str) else one for one in _several(memory))
        for one in _several(policy)
    ]
    results = dict(run_grid(found, setups, lambda of: make_arrivals(of, arrival, seed, where), engine, jobs))
    run = provenance(found, model=model, page_size=page_size, seed=seed, limit=limit, arrival=arrival, serve=serve)
    return LabTable([results[number].row for number in range(len(setups))], run)


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _spelling(policy: Policy) -> str:
    """Return the spelling of a policy; a class is added to the table of policies by its name."""
    if isinstance(policy, str):
        return policy
    EVICTION[policy.__name__] = policy
    return policy.__name__


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)

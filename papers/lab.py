"""Recorded traffic and lab runs for figures, shared between figures that need the same; a figure's run as JSON."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import ConfigError
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import run_grid
from headwater.lab.row import Result, Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Arrivals, Load, Recorded, TimedArrivals, in_order, natural, poisson
from headwater.traces.read import make_trace, read_trace
from headwater.traces.request import Trace
from papers.figure import Figure, Found
from papers.results import write_results

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Used:
    """A trace, for the figure's document; with a model, a page size and arrivals if it was replayed."""

    trace: str
    requests: int
    prompt_tokens: int
    model: str = ""
    page_size: int = 0
    arrivals: str = ""


@dataclass
class Lab:
    """Folders of recorded traffic (`data`) and of other simulators' results (`peers`), and the runs so far.

    limit: most sessions of a trace. jobs: processes; 0: one a core. seed: of all random draws.
    """

    data: Path | None = None
    peers: Path | None = None
    limit: int | None = None
    jobs: int = 0
    seed: int = 0
    used: dict[Used, None] = field(default_factory=dict)  # since `measure` cleared it
    _traces: dict[object, Trace] = field(default_factory=dict)
    _results: dict[object, Result] = field(default_factory=dict)

    def trace(self, name: str, sessions: int | None = None, first: int | None = None) -> Trace:
        """Return a trace of the data: all of it, `sessions` drawn with the seed, or its `first` sessions or requests.

        Raises TraceError if no trace has that name.
        """
        sessions = min((n for n in (sessions, self.limit) if n is not None), default=None)
        key = name, sessions, first
        if key not in self._traces:
            path = Path(name) if self.data is None else self.data / name
            whole = replace(read_trace(path, limit=first), name=name)
            self._traces[key] = whole if sessions is None else drawn(whole, sessions, self.seed)
        return self._traces[key]

    def drawn(self, spelling: str, sessions: int | None = None) -> Trace:
        """Return traffic spelled with options (`rag(zipf=1.2)`): all of it, or `sessions` drawn with the seed."""
        key = spelling, self.limit, sessions
        if key not in self._traces:
            whole = make_trace(spelling, self.data, limit=self.limit, seed=self.seed)
            self._traces[key] = whole if sessions is None else drawn(whole, sessions, self.seed)
        return self._traces[key]

    def published(self, name: str) -> Trace | None:
        """Return a paper's own trace of that file name, anywhere below the data; None if it is not there."""
        found = sorted(self.data.rglob(f"{name}*")) if self.data is not None else []
        return self.trace(str(found[0].relative_to(self.data))) if found and self.data is not None else None

    def run(
        self, trace: Trace, setups: Sequence[Setup], load: Load | None = None, engine: Engine | None = None
    ) -> list[Result]:
        """Replay the trace under each setup; earlier results are reused."""
        load = load or natural(trace)
        keys = [(trace.name, len(trace.requests), setup, load, engine) for setup in setups]
        todo = [i for i, key in enumerate(keys) if key not in self._results]

        def arrivals(of: Trace) -> Any:
            return load.over(of, self.seed)

        for number, result in run_grid(trace, [setups[i] for i in todo], arrivals, engine, self.jobs):
            self._results[keys[todo[number]]] = result
        for setup in setups:
            self.note(trace, setup.profile.name, setup.page_size, str(load))
        return [self._results[key] for key in keys]

    def rows(
        self, trace: Trace, setups: Mapping[Key, Setup], load: Load | None = None, engine: Engine | None = None
    ) -> dict[Key, Row]:
        """Replay the trace as `run` does; returns the row of each setup by its key."""
        results = self.run(trace, list(setups.values()), load, engine)
        return {key: result.row for key, result in zip(setups, results, strict=True)}

    def peer(self, *parts: str) -> Path:
        """Return the path of other simulators' results. Raises ConfigError if it does not exist."""
        if self.peers is None:
            raise ConfigError("results of other simulators are needed: say where with --peers")
        path = self.peers.joinpath(*parts)
        if not path.exists():
            raise ConfigError(f"{path} is not there")
        return path

    def note(self, trace: Trace, model: str = "", page_size: int = 0, arrivals: str = "") -> None:
        """Record traffic that a figure uses."""
        tokens = sum(request.prompt_tokens for request in trace.requests)
        self.used[Used(trace.name, len(trace.requests), tokens, model, page_size, arrivals)] = None


@dataclass(frozen=True, slots=True)
class InOrder:
    """Open loop over a paper's own trace: at its times, or in its order at `rate` requests a second on average."""

    rate: float | None = None

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        """Return the arrivals. Raises ConfigError if a request has no time and no rate is given."""
        if self.rate is not None:
            times = poisson(self.rate, 1.0, random.Random(f"open {seed}"))
            return TimedArrivals(zip(times, trace.requests, strict=False))
        return TimedArrivals(in_order(Recorded().over(trace, seed)))


@cache
def roofline(profile: str, device: str) -> Engine:
    """Return an engine timed by a device's roofline: one object for each model and device, so that runs are shared."""
    return Engine(StepCost(load_profile(profile), load_device(device)))


def mean_ttft(row: Row) -> float:
    """Return the mean milliseconds to the first token of a run with an engine."""
    assert row.ttft_ms is not None, "it ran under a clock"
    return row.ttft_ms.mean


def drawn(trace: Trace, sessions: int, seed: int) -> Trace:
    """Draw at most `sessions` sessions of a trace, in the trace's order."""
    names = list(dict.fromkeys(request.session for request in trace.requests))
    if len(names) <= sessions:
        return trace
    chosen = set(random.Random(f"sessions {seed}").sample(names, sessions))
    requests = tuple(request for request in trace.requests if request.session in chosen)
    return replace(trace, name=f"{sessions} sessions of {trace.name}", requests=requests)


def measure(figure: Figure, lab: Lab) -> dict[str, Any]:
    """Run a figure. Its `seconds` leave out runs that an earlier figure has shared."""
    assert figure.run is not None, f"{figure.name} is written by a benchmark"
    lab.used.clear()
    begin = time.perf_counter()
    found = figure.run(lab)
    return document(figure, lab, found, time.perf_counter() - begin)


def document(figure: Figure, lab: Lab, found: Found, seconds: float) -> dict[str, Any]:
    """Return a figure's outcome as JSON, with the traffic that the lab has noted. The page shows nothing else."""
    return {
        "figure": figure.name,
        "paper": figure.paper,
        "run": {"seed": lab.seed},
        "limit": lab.limit,
        "runs": [asdict(used) for used in lab.used],
        "seconds": round(seconds, 1),
        "rows": [asdict(line) for line in found.lines],
        "shapes": [asdict(shape) for shape in found.shapes],
    }


def write(document: Mapping[str, Any], folder: Path, *, small: bool = False) -> None:
    """Write a figure's document as a file of its name. The smallest run replaces no results of the project."""
    write_results(folder / f"{document['figure']}.json", document, seed=document["run"]["seed"], small=small)

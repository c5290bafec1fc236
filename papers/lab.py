"""What figures run on: recorded traffic by name, and setups over it. Figures that need the same runs share them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.lab.grid import run_grid
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.traces.arrivals import Load, natural
from headwater.traces.drawn import make_trace
from headwater.traces.read import read_trace
from headwater.traces.request import Trace


@dataclass(frozen=True, slots=True)
class Used:
    """One trace under one model, as a figure used it."""

    trace: str
    requests: int
    prompt_tokens: int
    model: str
    page_size: int
    arrivals: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Lab:
    """`data`: the folder with recorded traffic; `peers`: other simulators' results; `limit`: of a trace's sessions."""

    data: Path | None = None
    peers: Path | None = None
    limit: int | None = None
    jobs: int = 0
    seed: int = 0
    used: dict[Used, None] = field(default_factory=dict)  # since whoever reads it has cleared it
    _traces: dict[object, Trace] = field(default_factory=dict)
    _results: dict[object, Result] = field(default_factory=dict)

    def trace(self, name: str, sessions: int | None = None, first: int | None = None) -> Trace:
        """A trace of the data; `sessions` of it, drawn with the seed, or its `first` ones (requests if it has none).

        Raises TraceError where there is none of that name.
        """
        sessions = min((n for n in (sessions, self.limit) if n is not None), default=None)
        key = name, sessions, first
        if key not in self._traces:
            path = Path(name) if self.data is None else self.data / name
            whole = replace(read_trace(path, limit=first), name=name)
            self._traces[key] = whole if sessions is None else drawn(whole, sessions, self.seed)
        return self._traces[key]

    def drawn(self, spelling: str) -> Trace:
        """Traffic that is drawn with the seed, as `rag(zipf=1.2)`."""
        key = spelling, self.limit
        if key not in self._traces:
            self._traces[key] = make_trace(spelling, self.data, limit=self.limit, seed=self.seed)
        return self._traces[key]

    def run(
        self, trace: Trace, setups: Sequence[Setup], load: Load | None = None, engine: Engine | None = None
    ) -> list[Result]:
        """What each setup makes of the trace; what has run before is remembered."""
        load = load or natural(trace)
        keys = [(trace.name, len(trace.requests), setup, load, engine) for setup in setups]
        todo = [i for i, key in enumerate(keys) if key not in self._results]

        def arrivals(of: Trace) -> Any:
            return load.over(of, self.seed)

        for number, result in run_grid(trace, [setups[i] for i in todo], arrivals, engine, self.jobs):
            self._results[keys[todo[number]]] = result
        self._note(trace, setups, str(load))
        return [self._results[key] for key in keys]

    def peer(self, *parts: str) -> Path:
        """A file or folder of other simulators' results. Raises ConfigError where there is none."""
        if self.peers is None:
            raise ConfigError("results of other simulators are needed: say where with --peers")
        path = self.peers.joinpath(*parts)
        if not path.exists():
            raise ConfigError(f"{path} is not there")
        return path

    def _note(self, trace: Trace, setups: Sequence[Setup], arrivals: str) -> None:
        tokens = sum(request.prompt_tokens for request in trace.requests)
        for setup in setups:
            used = Used(trace.name, len(trace.requests), tokens, setup.profile.name, setup.page_size, arrivals)
            self.used[used] = None


def drawn(trace: Trace, sessions: int, seed: int) -> Trace:
    """So many of a trace's sessions, in the trace's order; the whole trace where it has no more."""
    names = list(dict.fromkeys(request.session for request in trace.requests))
    if len(names) <= sessions:
        return trace
    chosen = set(random.Random(f"sessions {seed}").sample(names, sessions))
    requests = tuple(request for request in trace.requests if request.session in chosen)
    return replace(trace, name=f"{sessions} sessions of {trace.name}", requests=requests)

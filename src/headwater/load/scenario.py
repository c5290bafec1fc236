"""Scenarios of the load generator: one load, overload, or one tenant during another one's flood.

All phases read their sessions from one source, each where the previous one stopped: drawn prompts do not repeat between
phases, shared prefixes do.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat

from headwater.load.endpoint import Endpoint
from headwater.load.generator import Limits, Load
from headwater.load.results import Result
from headwater.load.session import Call, Session, as_recorded, scheduled
from headwater.traces.arrivals import PROCESSES

QUIET, FLOOD = "quiet", "flood"  # the tenants of a run for fairness: values of cache_salt


@dataclass(frozen=True, slots=True)
class Pace:
    """Arrival of requests: from `clients` (closed loop), at a `rate`, or as recorded."""

    rate: float | None = None  # requests a second
    clients: int | None = None
    process: str = "poisson"
    cv: float = 2.0  # of gamma's gaps
    speed: float = 1.0  # of recorded times
    chats: int = 16  # open sessions if arrivals are drawn
    seed: int = 0

    @property
    def words(self) -> str:
        if self.clients is not None:
            return f"closed loop, {self.clients:,} clients"
        if self.rate is not None:
            return f"open loop, {self.process}, {self.rate:.3g} requests/s"
        return f"open loop, recorded times x {self.speed:g}"


@dataclass(frozen=True, slots=True)
class Phase:
    """One load and its results."""

    name: str
    pace: str
    results: list[Result]


class Scenario:
    """Phases of load, one after the other. `on_phase` is called before each with its name and requests, or None."""

    def __init__(
        self,
        endpoint: Endpoint,
        sessions: Iterable[Session],
        limits: Limits,
        keep_recorded: bool,
        on_phase: Callable[[str, int | None], None],
        on_result: Callable[[Result], None],
    ) -> None:
        self._endpoint, self._limits, self._keep_recorded = endpoint, limits, keep_recorded
        self._sessions = iter(sessions)
        self._on_phase, self._on_result = on_phase, on_result
        self._load: Load | None = None
        self.stopped = False

    @property
    def running(self) -> int:
        """Number of running requests, or of clients."""
        return self._load.running if self._load else 0

    def stop(self) -> None:
        self.stopped = True
        if self._load is not None:
            self._load.stop()

    async def warm(self, clients: int, requests: int) -> None:
        """Send requests that are not counted."""
        await self._phase("warm-up", Pace(clients=clients), Limits(requests))

    async def once(self, pace: Pace) -> list[Phase]:
        return [await self._phase("load", pace, self._limits)]

    async def overload(self, pace: Pace, factors: Iterable[float]) -> list[Phase]:
        """Measure the answers a second of a closed loop, then send each multiple of that rate in an open loop."""
        phases = [await self._phase("capacity", pace, self._limits)]
        capacity = answers_per_second(phases[0].results)
        for number, factor in enumerate(factors, 1):
            if self.stopped or capacity == 0:
                break
            rate = factor * capacity
            open_pace = replace(pace, rate=rate, clients=None, seed=pace.seed + number)
            phases.append(await self._phase(f"{factor:g}x", open_pace, self._limits))
        return phases

    async def fairness(self, pace: Pace, flood: float) -> list[Phase]:
        """Measure one tenant at `pace.rate`, first by itself, then with another one at `flood` times that rate."""
        assert pace.rate is not None
        limits = self._limits
        phases = [await self._phase("alone", pace, limits, self._calls(pace, QUIET))]
        if not self.stopped:
            loud = replace(pace, rate=pace.rate * flood, seed=pace.seed + 1)
            calls = heapq.merge(self._calls(pace, QUIET), self._calls(loud, FLOOD), key=lambda call: call.due)
            if limits.requests is not None:
                limits = replace(limits, requests=round(limits.requests * (1 + flood)))
            phases.append(await self._phase(f"with {flood:g} times as much", pace, limits, calls))
        return phases

    async def _phase(self, name: str, pace: Pace, limits: Limits, calls: Iterable[Call] | None = None) -> Phase:
        self._on_phase(name, limits.requests)
        load = self._load = Load(self._endpoint, limits, self._keep_recorded, self._on_result)
        if pace.clients is not None:
            results = await load.closed_loop(self._sessions, pace.clients)
        else:
            results = await load.open_loop(self._calls(pace) if calls is None else calls)
        return Phase(name, pace.words, results)

    def _calls(self, pace: Pace, tenant: str = "") -> Iterator[Call]:
        if pace.rate is None:
            return iter(as_recorded(self._sessions, pace.speed))
        times = PROCESSES[pace.process](pace.rate, pace.cv, random.Random(f"arrivals {pace.seed}"))
        sessions = self._sessions
        if tenant:
            sessions = (replace(session, tenant=of) for session, of in zip(self._sessions, repeat(tenant)))
        return scheduled(times, sessions, pace.chats)


def answers_per_second(results: list[Result]) -> float:
    ok = [result for result in results if result.outcome == "ok"]
    if not ok:
        return 0.0
    return len(ok) / (max(r.ended for r in ok) - min(r.sent for r in ok))

"""Arrival times of a trace's requests. Except in an open loop, a session's next request waits for the answer before.

Random numbers are drawn from a seed, request by request in the trace's order, so that the same seed gives the same load
whatever the answers' latency.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from typing import Protocol

from headwater.errors import ConfigError
from headwater.traces.request import Request, Trace

# sessions a second, and mean think time, if nothing is recorded (Marconi, section 5.1)
DEFAULT_RATE, DEFAULT_THINK_SECONDS = 1.0, 5.0
MIN_CV, MAX_CV = 1e-6, 100.0  # below, times are constant; above, nearly all are 0
NO_LATER_START = -math.inf
# endless ascending times in seconds, of a rate, a coefficient of variation and a random generator
Process = Callable[[float, float, random.Random], Iterator[float]]


class Arrivals(Protocol):
    """A load that reacts to answers. Times in seconds from its beginning."""

    def due(self) -> float | None:
        """Return the time of the next request; None if none comes before an answer is complete, or none at all."""

    def take(self) -> Request:
        """Remove and return the next request. Raises IndexError if none is due."""

    def answered(self, request: Request, now: float) -> None:
        """Record that a request was answered or failed, so that its session continues."""

    def __len__(self) -> int:
        """Return the number of requests still to come."""


class Load(Protocol):
    """Load: arrival times of a trace's requests."""

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        """Return new arrivals. Raises ConfigError if the options, or the trace, do not allow the load."""


@dataclass(slots=True)
class Script:
    """A session with the earliest time of each request on the load's clock, and its pause after the answer before."""

    requests: Sequence[Request]
    earliest: list[float]
    pauses: list[float]
    next: int = 0

    def due(self, now: float) -> float:
        return max(self.earliest[self.next], now + self.pauses[self.next], 0.0)


class ScriptedArrivals:
    """Arrivals from scripts: all of them from the beginning, or at most `clients` at once."""

    def __init__(self, scripts: Sequence[Script], clients: int | None = None) -> None:
        self._scripts = {script.requests[0].session: script for script in scripts}
        self._waiting = iter(self._scripts.values())
        self._left = sum(len(script.requests) for script in scripts)
        self._order = 0
        self._ready: list[tuple[float, int, Script]] = []
        for _ in range(len(scripts) if clients is None else clients):
            self._begin(0.0)

    def __len__(self) -> int:
        return self._left

    def due(self) -> float | None:
        return self._ready[0][0] if self._ready else None

    def take(self) -> Request:
        script = heapq.heappop(self._ready)[2]
        request = script.requests[script.next]
        script.next += 1
        self._left -= 1
        return request

    def answered(self, request: Request, now: float) -> None:
        script = self._scripts[request.session]
        if script.next < len(script.requests):
            self._push(script, now)
        else:
            self._begin(now)

    def _begin(self, now: float) -> None:
        script = next(self._waiting, None)
        if script is not None:
            self._push(script, now)

    def _push(self, script: Script, now: float) -> None:
        self._order += 1  # ties go to the script that was ready first
        heapq.heappush(self._ready, (script.due(now), self._order, script))


class TimedArrivals:
    """Arrivals at given times, ascending, whether or not earlier requests were answered."""

    def __init__(self, requests: Iterable[tuple[float, Request]]) -> None:
        self._coming = deque(requests)

    def __len__(self) -> int:
        return len(self._coming)

    def due(self) -> float | None:
        return self._coming[0][0] if self._coming else None

    def take(self) -> Request:
        return self._coming.popleft()[1]

    def answered(self, request: Request, now: float) -> None:
        """Do nothing: no request waits for an answer."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded times, `speed` times as fast. Raises ConfigError if a request has none."""

    speed: float = 1.0

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        positive(speed=self.speed)
        times = [request.at for request in trace.requests if request.at is not None]
        if len(times) < len(trace.requests):
            missing = len(trace.requests) - len(times)
            raise ConfigError(f"{missing:,} of {len(trace.requests):,} requests have no recorded time: give a rate")
        begin = min(times)
        return at_times(trace.requests, [(at - begin) / self.speed for at in times])


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions that begin independently, `rate` a second on average, in the trace's order.

    Think times between an answer and the next request are exponential, `think` seconds on average; None: as recorded,
    or DEFAULT_THINK_SECONDS on average if nothing is recorded.
    """

    rate: float = DEFAULT_RATE
    think: float | None = None

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        positive(rate=self.rate)
        _checked(think=self.think)
        starts = poisson(self.rate, 1.0, random.Random(f"starts {seed}"))
        scripts = [_script(requests, next(starts), self.think, seed) for requests in sessions_of(trace.requests)]
        return ScriptedArrivals(scripts)


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: `clients` take the sessions in the trace's order, each the next one when its last is done."""

    clients: int
    think: float | None = 0.0

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        positive(clients=self.clients)
        _checked(think=self.think)
        scripts = [_script(requests, NO_LATER_START, self.think, seed) for requests in sessions_of(trace.requests)]
        return ScriptedArrivals(scripts, self.clients)


@dataclass(frozen=True, slots=True)
class Open:
    """Open loop: a session's next request comes after a think time, whether or not the one before was answered.

    Sessions begin independently, `sessions` a second on average. Think times are gamma distributed, `think` seconds on
    average (None: as under `Poisson`) with coefficient of variation `cv`: 1 is exponential, 0 constant. With `rate`,
    requests keep that order and come independently, `rate` a second on average.
    """

    rate: float | None = None
    sessions: float = DEFAULT_RATE
    think: float | None = None
    cv: float = 1.0

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        positive(sessions=self.sessions, **({} if self.rate is None else {"rate": self.rate}))
        _checked(think=self.think)
        if not (isinstance(self.cv, int | float) and 0 <= self.cv <= MAX_CV):
            raise ConfigError(f"cv is {self.cv!r}, must be a number from 0 to {MAX_CV:g}")
        starts = poisson(self.sessions, 1.0, random.Random(f"starts {seed}"))
        scripts = [
            _script(requests, next(starts), self.think, seed, self.cv) for requests in sessions_of(trace.requests)
        ]
        coming = list(in_order(ScriptedArrivals(scripts)))
        if self.rate is not None:
            times = poisson(self.rate, 1.0, random.Random(f"open {seed}"))
            coming = [(at, request) for at, (_, request) in zip(times, coming, strict=False)]
        return TimedArrivals(coming)


def at_times(requests: Sequence[Request], times: Sequence[float]) -> Arrivals:
    """Return arrivals of each request at its time, or at its session's answer if that is later."""
    of = {id(request): at for request, at in zip(requests, times, strict=True)}
    scripts = [
        Script(session, [of[id(request)] for request in session], [0.0] * len(session))
        for session in sessions_of(requests)
    ]
    return ScriptedArrivals(scripts)


def natural(trace: Trace) -> Load:
    """Return the recorded times as a load; interleaved sessions if a request has no time."""
    return Recorded() if all(request.at is not None for request in trace.requests) else Poisson()


def in_order(arrivals: Arrivals) -> Iterator[tuple[float, Request]]:
    """Yield time and request of each arrival, as if answers took no time."""
    while (now := arrivals.due()) is not None:
        request = arrivals.take()
        arrivals.answered(request, now)
        yield now, request


def sessions_of(requests: Sequence[Request]) -> list[list[Request]]:
    """Return the sessions in the order of their first requests."""
    sessions: dict[str, list[Request]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return list(sessions.values())


def _script(session: list[Request], start: float, think: float | None, seed: int, cv: float = 1.0) -> Script:
    """Return a session's script from `start` on, with given, recorded or drawn think times, or recorded distances."""
    rng = random.Random(f"{seed} {session[0].session}")

    def draw(mean: float) -> float:
        if not mean or cv < MIN_CV:
            return mean
        return rng.expovariate(1 / mean) if cv == 1 else rng.gammavariate(1 / cv**2, cv**2 * mean)

    earliest, pauses = [start], [0.0]
    first = session[0].at
    for request in session[1:]:
        earliest.append(NO_LATER_START)
        if think is not None:
            pauses.append(draw(think))
        elif request.think is not None:
            pauses.append(request.think)
        elif request.at is not None and first is not None and start > NO_LATER_START:
            earliest[-1] = start + request.at - first
            pauses.append(0.0)
        else:
            pauses.append(draw(DEFAULT_THINK_SECONDS))
    return Script(session, earliest, pauses)


def positive(**values: float) -> None:
    """Raise ConfigError for a value that is not a number above 0."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"{name} is {value!r}, must be a number above 0")


def _checked(**values: float | None) -> None:
    """Raise ConfigError for a value that is neither None nor a number of 0 or more."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigError(f"{name} is {value!r}, must be a number of 0 or more")


def poisson(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Yield independent arrivals, `rate` a second on average: gaps are exponential."""
    return accumulate(rng.expovariate(rate) for _ in count())


def gamma(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Yield arrivals with gamma distributed gaps of coefficient of variation `cv`: 1 is Poisson, more is bursts."""
    return accumulate(rng.gammavariate(1 / cv**2, cv**2 / rate) for _ in count())


def constant(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Yield an arrival every 1/rate seconds."""
    return accumulate(repeat(1 / rate))


PROCESSES: dict[str, Process] = {"poisson": poisson, "gamma": gamma, "constant": constant}

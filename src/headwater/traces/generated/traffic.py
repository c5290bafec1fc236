"""Traffic of a drawn kind, as a trace: `generated(17)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headwater.errors import ConfigError
from headwater.request import Boundaries
from headwater.traces.generated.behaviours import BEHAVIOURS, Behaviour
from headwater.traces.generated.conversation import HOUR, SECOND, TokenIds, Words, milliseconds
from headwater.traces.generated.dice import Dice, zipf
from headwater.traces.request import Request, Trace
from headwater.traces.tokens import Tokens

KIND, SESSIONS, TENANTS, WORDS = range(4)  # streams of draws, which do not depend on each other
RETRY = 5 * SECOND  # after which a request is sent again, on average


@dataclass(frozen=True, slots=True)
class Source:
    """A behaviour and its part of the traffic."""

    name: str
    behaviour: Behaviour
    share: int  # permille of the requests
    phases: tuple[int, ...]  # numbers of the phases in which it is active
    boundaries: bool  # whether the parts of its prompts are known

    def __str__(self) -> str:
        """Share, name and parameters, in one line."""
        parameters = ", ".join(f"{one.name} {getattr(self.behaviour, one.name)}" for one in fields(self.behaviour))  # type: ignore[arg-type]
        phases = ", ".join(str(phase + 1) for phase in self.phases)
        known = "" if self.boundaries else "; parts of prompts unknown"
        return f"{self.share / 10:g}% {self.name} in phase {phases}: {parameters}{known}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic. Milliseconds, permille.

    Phases change at once: their ends are `phases`. Tenants share no prefix; the r-th has a part in proportion to 1/r².
    """

    sources: tuple[Source, ...]
    phases: tuple[int, ...]
    tenants: int = 1
    retries: int = 0  # requests that are sent again, within seconds

    @classmethod
    def drawn(cls, dice: Dice) -> Kind:
        """Draw one to four behaviours, one to three phases, and one to eight tenants."""
        horizon, count = dice.pick((1, 4, 12, 24)) * HOUR, dice.pick((1, 1, 2, 3))
        inner = sorted(dice.between(horizon // 5, horizon * 4 // 5) for _ in range(count - 1))
        names = [dice.pick(tuple(BEHAVIOURS)) for _ in range(dice.between(1, 4))]
        if set(names) == {"scans"}:
            names[0] = "chats"  # scans share nothing
        weights = [dice.between(1, 8) for _ in names]
        sources = []
        for number, name in enumerate(names):
            phases = tuple(phase for phase in range(count) if dice.happens(600)) or (number % count,)
            share = 1000 * sum(weights[: number + 1]) // sum(weights) - 1000 * sum(weights[:number]) // sum(weights)
            sources.append(Source(name, BEHAVIOURS[name].drawn(dice), share, phases, dice.happens(700)))
        return cls(tuple(sources), (*inner, horizon), dice.pick((1, 1, 2, 4, 8)), dice.pick((0, 0, 10, 50)))

    def windows(self, source: Source) -> list[tuple[int, int]]:
        """Return begin and end of the phases in which a source is active."""
        return [(self.phases[phase - 1] if phase else 0, self.phases[phase]) for phase in source.phases]

    def tenant(self, dice: Dice) -> str:
        """Draw the namespace of a session."""
        return "" if self.tenants == 1 else f"tenant {dice.choose(zipf(self.tenants, 200))}"


@dataclass(frozen=True, slots=True)
class Generated:
    """About `requests` requests of the kind of traffic that `seed` draws.

    Draws are integers (`dice.py`), so a seed gives the same requests on every machine. Another `--seed` draws other
    requests of the same kind.
    """

    seed: int
    requests: int = 2000

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Draw the trace. Raises ConfigError for options that are out of range."""
        if self.seed < 0 or self.requests < 1:
            raise ConfigError(f"seed is {self.seed}, must be 0 or more; requests are {self.requests:,}, at least 1")
        kind = self.kind()
        return Trace(name, drawn(kind, self.requests, self.seed, seed), notes=_notes(kind))

    def kind(self) -> Kind:
        return Kind.drawn(Dice(KIND, self.seed))


def drawn(kind: Kind, requests: int, *key: int) -> tuple[Request, ...]:
    """Draw about that many requests of a kind, in the order of their times. key: seeds of the draws."""
    found, ids = list[Request](), TokenIds()
    for number, source in enumerate(kind.sources):
        words = Words(ids, WORDS, *key, number)
        found += _of_source(kind, source, -(-requests * source.share // 1000), words, (*key, number))
    return tuple(sorted(found, key=milliseconds))


def _of_source(kind: Kind, source: Source, requests: int, words: Words, key: tuple[int, ...]) -> list[Request]:
    """Draw sessions that begin at any time of the source's phases, until they have that many requests."""
    windows, tenants, session = kind.windows(source), Dice(TENANTS, *key), 0
    found: list[Request] = []
    while len(found) < requests:
        dice = Dice(SESSIONS, *key, session)
        begin, end = _window(windows, dice)
        namespace = kind.tenant(tenants)
        made = source.behaviour.session(f"{key[-1]}.{session}", begin, end, dice, words)
        for request in _retried(made, kind.retries, end, dice):
            parts = request.boundaries if source.boundaries else Boundaries()
            found.append(replace(request, namespace=namespace, boundaries=parts))
        session += 1
    return found


def _window(windows: list[tuple[int, int]], dice: Dice) -> tuple[int, int]:
    """Draw a time in one of the windows, all times alike; return it and the window's end."""
    at = dice.below(sum(end - begin for begin, end in windows))
    for begin, end in windows:
        if at < end - begin:
            return begin + at, end
        at -= end - begin
    raise AssertionError("the time is within the windows' sum")


def _retried(made: list[Request], retries: int, end: int, dice: Dice) -> Iterator[Request]:
    """Yield the requests of a session, and those that are sent again, as sessions of their own with the same prompt."""
    for number, request in enumerate(made):
        yield request
        if dice.happens(retries):
            at = milliseconds(request) + dice.exponential(RETRY)
            if at < end:
                yield replace(request, session=f"{request.session} again {number}", at=at / 1000, retry=True)


def _notes(kind: Kind) -> tuple[str, ...]:
    hours = ", ".join(f"{end / 3_600_000:.3g}" for end in kind.phases)
    tenants = f"{kind.tenants} tenants" if kind.tenants > 1 else "1 tenant"
    return (*map(str, kind.sources), f"phases end after {hours} hours; {tenants}; {kind.retries / 10:g}% sent again")

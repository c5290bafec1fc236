"""Traffic of a drawn kind, as a trace: `generated(17)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.errors import ConfigError
from headwater.request import Boundaries
from headwater.traces.generated.conversation import SECOND, TokenIds, Words, milliseconds
from headwater.traces.generated.dice import Dice
from headwater.traces.generated.kind import Kind, Source
from headwater.traces.request import Request, Trace
from headwater.traces.tokens import Tokens

KIND, SESSIONS, TENANTS, WORDS = range(4)  # streams of draws, which do not depend on each other
RETRY = 5 * SECOND  # after which a request is sent again, on average


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

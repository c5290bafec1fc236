"""What is sent: sessions of turns, where a turn follows the answer to the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it adds to the conversation, or a prompt of its own."""

    messages: tuple[Message, ...] = ()  # new since the last answer
    prompt: str | tuple[int, ...] | None = None  # in place of messages: text or token ids, for /v1/completions
    reply: str | None = None  # as recorded
    at: float | None = None  # seconds on the recording's clock
    output_tokens: int | None = None  # None: as many as the run asks for
    fields: dict[str, Any] = field(default_factory=dict)  # what else its request said: tools, temperature, ...


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    turns: tuple[Turn, ...]
    tenant: str = ""  # sent as cache_salt; "" is none


@dataclass(eq=False, slots=True)
class Call:
    """A turn that is due at a time; calls of one session are in the order of its turns."""

    due: float  # seconds after the run's start
    session: Session
    turn: int


def interleaved(sessions: Iterable[Session], at_once: int) -> Iterator[tuple[Session, int]]:
    """Turns of `at_once` sessions in rotation; one that is over makes room for the next."""
    coming = iter(sessions)
    going: deque[tuple[Session, int]] = deque()
    while True:
        while len(going) < at_once and (fresh := next(coming, None)) is not None:
            going.append((fresh, 0))
        if not going:
            return
        session, turn = going.popleft()
        yield session, turn
        if turn + 1 < len(session.turns):
            going.append((session, turn + 1))


def scheduled(times: Iterator[float], sessions: Iterable[Session], at_once: int) -> Iterator[Call]:
    """An arrival for each turn."""
    for session, turn in interleaved(sessions, at_once):
        yield Call(next(times), session, turn)


def as_recorded(sessions: Iterable[Session], speed: float) -> list[Call]:
    """Calls at their recorded times, `speed` times as fast, from 0 on. Raises ValueError where no time is known."""
    calls = []
    for session in sessions:
        for number, turn in enumerate(session.turns):
            if turn.at is None:
                raise ValueError(f"session {session.id} has no recorded times: give a rate or a concurrency")
            calls.append(Call(turn.at, session, number))
    calls.sort(key=lambda call: call.due)
    start = calls[0].due if calls else 0.0
    for call in calls:
        call.due = (call.due - start) / speed
    return calls

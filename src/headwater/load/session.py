"""Sessions of a load: turns that follow one another's answers, in the order in which they are due; and drawn ones.

Drawn sessions are endless, and the same for the same seed. Their lengths are exact as token ids; as text, a word stands
for a token, which is about right for vocabularies of common size.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from headwater.errors import ConfigError

COMMON = """
the of and to in is that it was for on are as with his they be at one have this from or had by but some what
there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my
sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under name
"""
WORDS = tuple(COMMON.split())

Message = dict[str, Any]
Words = tuple[int | str, ...]  # or token ids


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: messages that it adds to the conversation, or a prompt of its own."""

    messages: tuple[Message, ...] = ()  # new since the last answer
    prompt: str | tuple[int, ...] | None = None  # text or token ids for /v1/completions, instead of messages
    reply: str | None = None  # as recorded
    at: float | None = None  # seconds on the recording's clock
    output_tokens: int | None = None  # None: the run's
    fields: dict[str, Any] = field(default_factory=dict)  # other fields of the request: tools, temperature, ...


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation."""

    id: str
    turns: tuple[Turn, ...]
    tenant: str = ""  # sent as cache_salt, if not empty


@dataclass(eq=False, slots=True)
class Call:
    """A turn with the time at which it is due. Calls of one session are in the order of its turns."""

    due: float  # seconds after the run's start
    session: Session
    turn: int


def interleaved(sessions: Iterable[Session], at_once: int) -> Iterator[tuple[Session, int]]:
    """Yield turns of `at_once` sessions in rotation; the next session takes the place of one that has ended."""
    upcoming = iter(sessions)
    open: deque[tuple[Session, int]] = deque()
    while True:
        while len(open) < at_once and (new := next(upcoming, None)) is not None:
            open.append((new, 0))
        if not open:
            return
        session, turn = open.popleft()
        yield session, turn
        if turn + 1 < len(session.turns):
            open.append((session, turn + 1))


def scheduled(times: Iterator[float], sessions: Iterable[Session], at_once: int) -> Iterator[Call]:
    """Yield each turn with the next arrival time as the time at which it is due."""
    for session, turn in interleaved(sessions, at_once):
        yield Call(next(times), session, turn)


def as_recorded(sessions: Iterable[Session], speed: float) -> list[Call]:
    """List calls at their recorded times from 0 on, `speed` times as fast, but no turn before the one that it follows.

    Raises ValueError for a turn without a time.
    """
    calls: list[Call] = []
    for session in sessions:
        latest = -math.inf
        for number, turn in enumerate(session.turns):
            if turn.at is None:
                raise ValueError(f"session {session.id} has no recorded times: give a rate or a concurrency")
            latest = max(latest, turn.at)
            calls.append(Call(latest, session, number))
    calls.sort(key=lambda call: call.due)
    start = calls[0].due if calls else 0.0
    for call in calls:
        call.due = (call.due - start) / speed
    return calls


@dataclass(frozen=True, slots=True)
class Drawing:
    """Sizes of drawn sessions."""

    prompt_tokens: int = 128  # of each turn's own text
    prefix_tokens: int = 1024  # of a shared prefix or system prompt
    prefixes: int = 4  # different ones
    turns: int = 4  # of a chat
    vocab: int | None = None  # token ids are drawn below it; None: words are drawn
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "prefixes", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


def shared(drawing: Drawing) -> Iterator[Session]:
    """Draw single requests that begin with one of a pool of prefixes."""
    return _drawn("shared", replace(drawing, turns=1), _prefixes(drawing))


def chat(drawing: Drawing) -> Iterator[Session]:
    """Draw chats with one of a pool of system prompts."""
    if drawing.vocab is not None:
        raise ConfigError(f"chats are messages, so vocab ({drawing.vocab:,}) does not apply: leave it out")
    return _drawn("chat", drawing, _prefixes(drawing))


def unique(drawing: Drawing) -> Iterator[Session]:
    """Draw single requests that share nothing."""
    return _drawn("unique", replace(drawing, turns=1), [])


DRAWN: dict[str, Callable[[Drawing], Iterator[Session]]] = {"shared": shared, "chat": chat, "unique": unique}


def _drawn(kind: str, drawing: Drawing, prefixes: list[Words]) -> Iterator[Session]:
    rng = random.Random(f"{kind} {drawing.seed}")
    for number in count():
        prefix = rng.choice(prefixes) if prefixes else ()
        own = [_draw(rng, drawing.prompt_tokens, drawing.vocab) for _ in range(drawing.turns)]
        yield Session(f"{kind}/{number}", (_turn(prefix, own[0]), *(_turn((), words) for words in own[1:])))


def _prefixes(drawing: Drawing) -> list[Words]:
    rng = random.Random(f"prefixes {drawing.seed}")
    return [_draw(rng, drawing.prefix_tokens, drawing.vocab) for _ in range(drawing.prefixes)]


def _draw(rng: random.Random, n: int, vocab: int | None) -> Words:
    return tuple(rng.choices(WORDS if vocab is None else range(vocab), k=n))


def _turn(prefix: Words, own: Words) -> Turn:
    if isinstance(own[0], int):
        return Turn(prompt=(*prefix, *own))  # type: ignore[arg-type]
    messages = [{"role": "user", "content": " ".join(map(str, own))}]
    if prefix:
        messages.insert(0, {"role": "system", "content": " ".join(map(str, prefix))})
    return Turn(tuple(messages))

"""Texts of drawn traffic: token ids that were never used before, texts that are shared, and conversations of both.

Scripted traffic returns to an earlier prefix, to test whether a cache still holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from headwater.errors import ConfigError
from headwater.request import Boundaries
from headwater.traces.generated.dice import Dice
from headwater.traces.request import Request, Trace
from headwater.traces.tokens import Tokens

SECOND, HOUR = 1000, 3_600_000  # times are in milliseconds
LONGEST = 32_768  # tokens of a prompt
ANSWER_TOKENS = 256  # of scripted traffic
QUERY_TOKENS = 1_024  # likewise, after the earlier prefix
SPREAD = 70  # percent of an octave: the usual spread of lengths


@dataclass(slots=True)
class TokenIds:
    """Token ids from 0 on, of which the first `used` are in texts."""

    used: int = 0


class Words:
    """Source of texts. A named text is the same at each use, and its length depends only on its name."""

    def __init__(self, ids: TokenIds, *key: int) -> None:
        self._key, self._ids = key, ids
        self._named: dict[tuple[int, ...], array[int]] = {}

    def new(self, tokens: int) -> array[int]:
        """Return token ids that no other text has."""
        first = self._ids.used
        self._ids.used += tokens
        return array("i", range(first, first + tokens))

    def named(self, *name: int, median: int, spread: int = SPREAD) -> array[int]:
        """Return the text of that name, of a log-normal length."""
        if name not in self._named:
            self._named[name] = self.new(Dice(*self._key, *name).around(median, spread))
        return self._named[name]


@dataclass(slots=True)
class Conversation:
    """Messages one after the other, and the requests that were made so far. Times in milliseconds."""

    session: str
    system: array[int]
    text: array[int] = field(default_factory=lambda: array("i"))
    _asked: list[tuple[int, int, int, int]] = field(default_factory=list)  # time, start of the query, end, answer

    def __post_init__(self) -> None:
        self.text = (self.text or self.system)[:]  # it grows, and others may begin alike

    def ask(self, at: int, query: array[int], answer: array[int]) -> None:
        start = len(self.text)
        self.text += query
        self._asked.append((at, start, len(self.text), len(answer)))
        self.text += answer

    def ends(self) -> list[int]:
        """Return the tokens up to the end of each answer."""
        return [end + answer for _, _, end, answer in self._asked]

    def until(self, end: int, session: str = "") -> Conversation:
        """Return a conversation that continues after the first `end` tokens; the session is the same by default."""
        return Conversation(session or self.session, self.system, self.text[:end])

    def requests(self) -> Iterator[Request]:
        """Yield the requests so far, which share one text."""
        text = self.text.tobytes()
        for at, start, end, answer in self._asked:
            yield asked(self.session, text, at, (len(self.system), start, end), answer)


def asked(session: str, text: bytes, at: int, parts: tuple[int, int, int], answer: int) -> Request:
    """Return a request. parts: the ends of the system prompt, of what precedes the query, and of the prompt."""
    system, start, end = parts
    return Request(
        session, text, end, answer, end + answer, at / 1000, boundaries=Boundaries(system or None, start, end - 1)
    )


def milliseconds(request: Request) -> int:
    """Return the time of a drawn request."""
    assert request.at is not None, "drawn requests have times"
    return round(1000 * request.at)


@dataclass(frozen=True, slots=True)
class ForkedChains:
    """`chains` sessions of `tokens` tokens one after the other, then a fork off the first one, then a request of each.

    A session grows by `turn` tokens a request. The fork shares `fork` tokens with the first. A cache that evicts the
    least recently used state has evicted that one, although the KV and the deeper states are there (SGLang, pull
    request 38000: three chains of 32,768 tokens, a state every 2,048, a fork at 8,192).
    """

    chains: int = 3
    tokens: int = 32_768
    turn: int = 2_048
    fork: int = 8_192

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Write the trace; nothing is drawn. Raises ConfigError for lengths that are not a multiple of `turn`."""
        _check(self.turn, tokens=self.tokens, fork=self.fork)
        words, clock = Words(TokenIds()), count()
        made, grown = list[Request](), list[Conversation]()
        for chain in range(self.chains):
            talk = Conversation(f"chain {chain}", words.new(0))
            _grow(talk, self.tokens // self.turn, self.turn, words, clock)
            grown.append(talk)
            made += talk.requests()
        for session, begin in (("fork", grown[0].until(self.fork)), *((one.session, one) for one in grown)):
            again = begin.until(len(begin.text), session)
            again.ask(SECOND * next(clock), words.new(QUERY_TOKENS), words.new(ANSWER_TOKENS))
            made += again.requests()
        return Trace(name, tuple(made))


@dataclass(frozen=True, slots=True)
class Compacted:
    """`sessions` sessions that grow to `tokens` tokens, are compacted, continue, and return to the earlier history.

    Compaction replaces the history by `summary` tokens, and `turns` requests of `turn` tokens follow. Then each session
    sends a request that continues its whole earlier history.
    """

    sessions: int = 3
    tokens: int = 24_576
    turn: int = 2_048
    summary: int = 1_024
    turns: int = 6

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Write the trace; nothing is drawn. Raises ConfigError for lengths that are not a multiple of `turn`."""
        _check(self.turn, tokens=self.tokens)
        words, clock = Words(TokenIds()), count()
        made, whole = list[Request](), list[Conversation]()
        for session in range(self.sessions):
            talk = Conversation(f"session {session}", words.new(0))
            _grow(talk, self.tokens // self.turn, self.turn, words, clock)
            whole.append(talk)
            after = Conversation(talk.session, words.new(self.summary))
            _grow(after, self.turns, self.turn, words, clock)
            made += [*talk.requests(), *after.requests()]
        for talk in whole:
            back = talk.until(self.tokens)
            back.ask(SECOND * next(clock), words.new(QUERY_TOKENS), words.new(ANSWER_TOKENS))
            made += back.requests()
        return Trace(name, tuple(made))


def _grow(talk: Conversation, turns: int, turn: int, words: Words, clock: count[int]) -> None:
    for _ in range(turns):
        talk.ask(SECOND * next(clock), words.new(turn - ANSWER_TOKENS), words.new(ANSWER_TOKENS))


def _check(turn: int, **lengths: int) -> None:
    if turn <= ANSWER_TOKENS:
        raise ConfigError(f"turn is {turn:,} tokens, must be more than the answer's {ANSWER_TOKENS:,}")
    for name, tokens in lengths.items():
        if tokens < turn or tokens % turn:
            raise ConfigError(f"{name} is {tokens:,}, must be a multiple of turn, {turn:,}")

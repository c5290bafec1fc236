"""Scripted traffic that returns to an earlier prefix, to test whether a cache still holds it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

from headwater.errors import ConfigError
from headwater.traces.generated.conversation import SECOND, Conversation, TokenIds, Words
from headwater.traces.request import Request, Trace
from headwater.traces.tokens import Tokens

ANSWER_TOKENS = 256
QUERY_TOKENS = 1_024  # after the earlier prefix


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

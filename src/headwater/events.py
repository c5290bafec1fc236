"""Events of a request, from the engine to whoever submitted it."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.account import CacheAccount


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` is what may be shown now: whole characters, nothing that may begin a stop string."""

    token: int
    text: str
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt's tokens with their log probabilities, before the first token; told where they were asked for.

    The first has none, nothing being before it. Texts are left empty.
    """

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    finish_reason: str  # "stop" | "length"
    text: str  # what was held back and may be shown after all
    account: CacheAccount
    output_tokens: int
    stop: str | int | None = None  # the stop string or token that ended it
    queued_seconds: float | None = None  # from its submission until its first leg ran; None: not told


@dataclass(frozen=True, slots=True)
class FailedEvent:
    error: Exception


Event = PromptEvent | TokenEvent | FinishedEvent | FailedEvent

"""Events of a request, from the engine to its submitter."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.account import CacheAccount


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` has complete characters only, and no possible beginning of a stop string.

    `rank` counts from 1, the most likely token; it is known for tokens of a prompt only.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt's tokens with their log probabilities, if requested; sent before the first token.

    The first prompt token has no log probability. Texts are empty.
    """

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    finish_reason: str  # "stop" | "length"
    text: str  # text held back so far
    account: CacheAccount
    output_tokens: int
    stop: str | int | None = None  # the stop string or token that ended the answer
    queued_seconds: float | None = None  # from submission until the first leg ran; None: unknown
    accepted_drafts: int = 0  # tokens of the answer that were drafted
    rejected_drafts: int = 0
    cached_on_arrival: int | None = None  # tokens of the prompt, to a checkpoint; None: it has segments, or is scored


@dataclass(frozen=True, slots=True)
class FailedEvent:
    error: Exception


Event = PromptEvent | TokenEvent | FinishedEvent | FailedEvent

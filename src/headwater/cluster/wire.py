"""Messages between routers and workers, in msgpack: requests, their answers, and heartbeats.

A worker's message names its incarnation, and an answer its request and attempt, so that messages of cancelled attempts
and of earlier incarnations are recognised and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from headwater.cluster.cost import Role
from headwater.cluster.sockets import Contact
from headwater.engine.meter import Backlog, EngineStats
from headwater.errors import (
    ConfigError,
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    HeadwaterError,
    InvalidLogits,
    OutOfPages,
    QueueFull,
    RequestTooLarge,
)
from headwater.events import Event, FailedEvent, FinishedEvent, PromptEvent, TokenEvent
from headwater.request import Generation
from headwater.schedule.sequence import tokens_of

Decoded = TypeVar("Decoded")

NO_CONTACT = Contact("", b"")
BY_FIELDS = (OutOfPages, QueueFull, DeadlineExceeded)  # errors whose message is made of their fields
BY_MESSAGE = (RequestTooLarge, EngineStopped, ConstraintError, ConfigError, InvalidLogits)


class Ping(msgspec.Struct, array_like=True, tag=True):
    """Heartbeat of a router. A worker answers the first one of a connection with its facts (`WorkerInfo`)."""

    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """Worker whose memory others of its pool can read."""

    incarnation: bytes
    contact: Contact


class Members(msgspec.Struct, array_like=True, tag=True):
    """The workers of a worker's pool, itself included."""

    peers: tuple[Peer, ...]


class AboutRequest(msgspec.Struct, array_like=True):
    """Message about one attempt to answer a request."""

    request: int
    attempt: int


class WithPrompt(AboutRequest):
    """Message with a request's prompt.

    `generation` is without its prompt, and `prompt` the prompt's index key: reading 8,192 integers takes twice as long.
    """

    generation: Generation
    prompt: bytes

    @property
    def whole(self) -> Generation:
        """The request with its prompt. Raises struct.error for a prompt with a part of a token."""
        return replace(self.generation, prompt=tokens_of(self.prompt))


class Submit(WithPrompt, tag=True):
    """A request for a worker.

    `output`: the tokens of its answer that another worker sent, except the last one, which is sent again and compared.
    `peers`: incarnations of workers that have more of its prompt cached, or have prefilled it.
    `begun`: its client has tokens of the answer, so that it must not be refused.
    """

    output: tuple[int, ...] = ()
    peers: tuple[bytes, ...] = ()
    begun: bool = False


class KeepAnswer(WithPrompt, tag=True):
    """Order to prefill a finished answer, so that its next turn resumes at this worker. Nothing is sent back.

    `prompt`: the index key of prompt and answer.
    """


class FollowMessage(AboutRequest, tag=True):
    """Prompt that another worker prefills, and whose answer this worker will decode."""

    namespace: str
    prompt: bytes  # its index key
    peer: bytes  # incarnation of the other worker


class Cancel(AboutRequest, tag=True):
    """End of a request, or of its followed prefill: its client has left, or another worker answers."""


class Prepare(AboutRequest, tag=True):
    """Order to have a segment in memory, pulled or built, numbered like a request.

    `segment`: its encoded key. `peers`: incarnations of workers that have it.
    """

    segment: bytes
    peers: tuple[bytes, ...] = ()


class WorkerInfo(msgspec.Struct, array_like=True, tag=True):
    """Facts about a worker that do not change."""

    fingerprint: str  # equal ones compute equal bits
    process: int  # its number on its host
    model: str
    max_model_len: int  # tokens
    max_running: int
    unit_bytes: int  # of the index key's unit, which a digest stands for
    live: str  # addresses of its KV events
    replay: str
    health: dict[str, Any]
    parts: Contact = NO_CONTACT  # from which others of its pool pull prefixes
    role: Role = Role.BOTH
    draft_bytes: int = 0  # of its memory, for drafts
    mtp_bytes: int = 0  # likewise, for the entries of the model's head: 0 without one


class Heartbeat(msgspec.Struct, array_like=True, tag=True):
    """Heartbeat of a worker, with the requests that wait for it."""

    backlog: Backlog


class StatsMessage(msgspec.Struct, array_like=True, tag=True):
    """Gauges and counters of a worker."""

    stats: EngineStats


class PromptMessage(AboutRequest, tag=True):
    """Log probabilities of a prompt."""

    event: PromptEvent


class TokenMessage(AboutRequest, tag=True):
    """One token of an answer."""

    event: TokenEvent


class FinishedMessage(AboutRequest, tag=True):
    """End of an answer."""

    event: FinishedEvent


class PreparedMessage(AboutRequest, tag=True):
    """End of an order: the segment is in memory, or cannot be."""

    stored: bool


class FailedMessage(AboutRequest, tag=True):
    """Error of a request: its class, message and fields."""

    kind: str
    message: str
    fields: dict[str, Any]

    @property
    def event(self) -> FailedEvent:
        return FailedEvent(self.error)

    @property
    def error(self) -> HeadwaterError:
        """The error; of an unknown class or with other fields, one with its message."""
        with suppress(TypeError):
            for kind in BY_FIELDS:
                if kind.__name__ == self.kind:
                    return kind(**self.fields)
            for named in BY_MESSAGE:
                if named.__name__ == self.kind:
                    return named(self.message, **self.fields)
        return HeadwaterError(self.message)


Answered = PromptMessage | TokenMessage | FinishedMessage | FailedMessage
ToWorker = Ping | Members | Submit | KeepAnswer | FollowMessage | Prepare | Cancel
OfRequests = WorkerInfo | PreparedMessage | Answered  # messages that a router handles
FromWorker = Heartbeat | StatsMessage | OfRequests


class Batch(msgspec.Struct, array_like=True):
    """Messages of one worker, in order."""

    incarnation: bytes
    messages: list[FromWorker]


encode: Callable[[ToWorker | Batch], bytes] = msgspec.msgpack.Encoder().encode


class WireError(HeadwaterError):
    """A message is not one of those that routers and workers send."""


def decoded(decoder: msgspec.msgpack.Decoder[Decoded], payload: bytes) -> Decoded:
    """Read a message. Raises WireError."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise WireError(str(error)) from error


for_worker: Callable[[bytes], ToWorker] = partial(decoded, msgspec.msgpack.Decoder(ToWorker))
from_worker: Callable[[bytes], Batch] = partial(decoded, msgspec.msgpack.Decoder(Batch))


def answer_of(request: int, attempt: int, event: Event) -> Answered:
    """Return the message of an event."""
    if isinstance(event, TokenEvent):
        return TokenMessage(request, attempt, event)
    if isinstance(event, FinishedEvent):
        return FinishedMessage(request, attempt, event)
    if isinstance(event, PromptEvent):
        return PromptMessage(request, attempt, event)
    error = event.error
    fields = dict(vars(error)) if type(error) in (*BY_FIELDS, *BY_MESSAGE) else {}
    return FailedMessage(request, attempt, type(error).__name__, str(error), fields)

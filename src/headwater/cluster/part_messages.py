"""Messages between workers of a pool, in msgpack: one asks another for parts of a prompt, then for each part.

The index key of a prompt goes to the holder once, with `Find`; its answer, `Found`, has a ticket for the prefix, and
the parts are asked for by their number. A segment is one part, asked for by its key, and so is the tail of a prompt,
asked for by its number. The answer to `Get`, `GetSegment` and `GetTail` is `Sent`, after which the payload follows in
frames of its own unless it is in the shared buffer that was named; or `Missing`. `FAILED` is the answer to a question
that cannot be answered.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headwater.cluster.shared_buffers import BufferPlace
from headwater.cluster.wire import decoded


class AboutPrefix(msgspec.Struct, array_like=True):
    """Question to one incarnation of a worker."""

    incarnation: bytes


class Find(AboutPrefix, tag=True):
    """Question for the deepest prefix of a prompt. `key`: of the index. `tokens`: of the prompt."""

    namespace: str
    key: bytes
    tokens: int


class Follow(AboutPrefix, tag=True):
    """Question for the prefix that ends at `at`, in tokens, which may not have been computed yet.

    The answer is `Found`, with the names of all of its parts, if the worker may have it at all.
    """

    namespace: str
    key: bytes
    at: int


class Ready(AboutPrefix, tag=True):
    """Question for how much of a prefix is there: `Progress`."""

    ticket: bytes


class Get(AboutPrefix, tag=True):
    """Question for one part of a prefix, by its place among the names that were found."""

    ticket: bytes
    part: int
    into: BufferPlace | None = None


class GetSegment(AboutPrefix, tag=True):
    """Question for a segment. `key`: encoded."""

    key: bytes
    into: BufferPlace | None = None


class GetTail(AboutPrefix, tag=True):
    """Question for the tail of a prompt that was prefilled for the worker that asks."""

    id: bytes
    entries: int  # bytes of the head's entries of a page: 0 without them
    into: BufferPlace | None = None


class Found(msgspec.Struct, array_like=True, tag=True):
    """Position at which a prefix ends, in tokens, and the names of its parts; none if nothing is cached."""

    at: int
    names: list[str]
    ticket: bytes = b""  # secret, and forgotten after a while


class Sent(msgspec.Struct, array_like=True, tag=True):
    """A part, without its key, which the worker that asks has, and its payload."""

    header: bytes
    seal: bytes
    shared: int | None = None  # bytes of payload in the buffer that was named; None: it follows
    why_not: str = ""  # a buffer was named, and the payload follows


class Progress(msgspec.Struct, array_like=True, tag=True):
    """Parts of a prefix that are there."""

    kv_tokens: int
    state_at: int  # the prefix's length, or 0: its state is not there


class Missing(msgspec.Struct, array_like=True, tag=True):
    """A part is not there."""

    is_forgotten: bool = False  # the ticket is not known: the prompt is to be sent again


Question = Find | Follow | Ready | Get | GetSegment | GetTail
Answer = Found | Progress | Sent | Missing
FAILED = b"\xc0"  # nil

encode: Callable[[Question | Answer], bytes] = msgspec.msgpack.Encoder().encode
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def question(payload: bytes) -> Question:
    """Read a question. Raises WireError."""
    return decoded(_question, payload)


def answer(payload: bytes) -> Answer:
    """Read the first frame of an answer. Raises WireError."""
    return decoded(_answer, payload)

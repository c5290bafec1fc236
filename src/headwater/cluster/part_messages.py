"""Messages between workers of a pool, in msgpack: one asks another for parts of a prompt, then for each part.

The answer to `Find` is `Found`; to `Get` it is the part's bytes, in as many frames as they have pieces, or one empty
frame if the part is not there. `FAILED` is the answer to a question that cannot be answered.
"""

from __future__ import annotations

import msgspec

from headwater.cluster.wire import WireError


class AboutPrefix(msgspec.Struct, array_like=True):
    """Question to one incarnation of a worker about a prompt. `key`: of the index."""

    incarnation: bytes
    namespace: str
    key: bytes


class Find(AboutPrefix, tag=True):
    """Question for the deepest prefix of a prompt of so many tokens."""

    tokens: int


class Get(AboutPrefix, tag=True):
    """Question for one part of the prefix that ends at `at`, in tokens; `key` may go on after it."""

    at: int
    name: str


class Found(msgspec.Struct, array_like=True):
    """Position at which a prefix ends, in tokens, and the names of its parts; none if nothing is cached."""

    at: int
    names: list[str]


FAILED = b"\xc0"  # nil: no answer to `Find`, and shorter than any part

_encoder = msgspec.msgpack.Encoder()
_question: msgspec.msgpack.Decoder[Find | Get] = msgspec.msgpack.Decoder(Find | Get)
_found = msgspec.msgpack.Decoder(Found)


def encode(message: Find | Get | Found) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def question(payload: bytes) -> Find | Get:
    """Read a question. Raises WireError."""
    try:
        return _question.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise WireError(str(error)) from error


def found(payload: bytes) -> Found:
    """Read the answer to `Find`. Raises WireError."""
    try:
        return _found.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise WireError(str(error)) from error

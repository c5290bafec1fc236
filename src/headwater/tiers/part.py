"""Stored parts: a header, a key, a payload, and a keyed BLAKE3 digest of all of it.

The key is that of the index up to the part's end, or a segment's. The digest is checked on every read. It detects
flipped bits and, since its own key is secret, parts that were renamed, or written by a process without that key.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from headwater.errors import HeadwaterError
from headwater.tiers.names import DIGEST_BYTES, TAG_BYTES

MAGIC, VERSION = b"hwtr", 2
# magic, version, kind, position of start and end in units, seconds of its computation, digest of the key up to the
# start, bytes of key and payload
HEADER = struct.Struct(f"<4sHcxQQd{DIGEST_BYTES + TAG_BYTES}sQQ")
SEAL_BYTES = 32
Buffer = bytes | bytearray | memoryview


class CorruptPart(HeadwaterError):
    """A stored part is damaged."""


@dataclass(frozen=True, slots=True)
class Part:
    """A state, the KV of a run of pages, a tail, the head's entries of these, or a segment, with its place.

    Positions are in units of the index; those of a tail, and of a segment, whose interior they delimit, in tokens.
    """

    kind: str  # STATE, RUN, TAIL, SEGMENT, ENTRIES or FINGERPRINT
    start: int  # a run's begin; for a state, the position of the previous checkpoint
    end: int
    key: Buffer  # of the index, up to the end; of a segment, encoded
    payload: Sequence[Buffer]  # one after the other
    seconds: float = 0.0  # of its computation
    below: str = ""  # digest of the key up to the start: the end of the run before a run, or of the state before a tail

    @property
    def bytes(self) -> int:
        return sum(len(one) for one in self.payload)


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Name and place of a part of a prefix. Positions in units of the index, in tokens of a tail."""

    name: str
    kind: str  # STATE, RUN, TAIL or ENTRIES
    end: int
    start: int = 0  # of a run or a tail, and of its entries
    below: str = ""  # digest of the key up to the start of a run or a tail
    of_tail: bool = False


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that ends at a state, and its parts: runs of KV, the first ones first, then the state, then tails."""

    namespace: str
    key: bytes  # of the index, up to its end, or to that of a tail
    at: int  # position of the state, in tokens
    places: Sequence[PartPlace]

    @property
    def names(self) -> list[str]:
        """Names of its parts."""
        return [place.name for place in self.places]


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a part, by which a store evicts. It is not checked by itself: only the whole part is."""

    kind: str
    seconds: float
    below: str

    @classmethod
    def of(cls, content: Buffer) -> Header | None:
        """Read the beginning of a part, at least `HEADER.size` bytes; None if it is not a header."""
        if len(content) < HEADER.size:
            return None
        magic, version, kind, _, _, seconds, below, _, _ = HEADER.unpack_from(content)
        if (magic, version) != (MAGIC, VERSION) or not is_duration(seconds):
            return None
        return cls(kind.decode("latin-1"), seconds, below.hex())


def key_bytes_of(header: Buffer) -> int:
    """Return the bytes of the key after a header; 0 for bytes that are not a header."""
    n_key: int = HEADER.unpack(header)[-2] if len(header) == HEADER.size else 0
    return n_key


def is_duration(seconds: float) -> bool:
    """Return whether a number from an unchecked header is a duration in seconds."""
    return 0.0 <= seconds < math.inf


class Sealer:
    """Writes parts to bytes, and reads them again, with a secret key."""

    def __init__(self, key: bytes) -> None:
        self._key = blake3(b"headwater part", key=key).digest()

    def seal(self, name: str, part: Part) -> list[Buffer]:
        """Return the bytes of a part, in pieces to write one after the other."""
        below = bytes.fromhex(part.below)
        place = part.kind.encode(), part.start, part.end, part.seconds, below
        header = HEADER.pack(MAGIC, VERSION, *place, len(part.key), part.bytes)
        return [header, part.key, *part.payload, self._digest(name, header, part.key, *part.payload)]

    def unseal(self, name: str, content: Buffer) -> Part:
        """Return the part that was stored under a name. Raises CorruptPart."""
        view = memoryview(content)
        least = HEADER.size + SEAL_BYTES
        if len(view) < least:
            raise CorruptPart(f"the part has {len(view):,} bytes; header and digest take {least}")
        n_key = HEADER.unpack_from(view)[-2]
        end = len(view) - SEAL_BYTES
        at = min(HEADER.size + n_key, end)
        return self.check(name, view[: HEADER.size], view[HEADER.size : at], [view[at:end]], view[end:])

    def check(self, name: str, header: Buffer, key: Buffer, payload: Sequence[Buffer], seal: Buffer) -> Part:
        """Return the part whose stored bytes are these pieces. Raises CorruptPart."""
        magic, version, kind, start, end, seconds, below, n_key, n_payload = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise CorruptPart(f"the header has {magic!r}, version {version}; must be {MAGIC!r}, version {VERSION}")
        sizes = len(key), sum(map(len, payload))
        if (n_key, n_payload) != sizes:
            raise CorruptPart(f"key and content have {sizes} bytes, the header has {(n_key, n_payload)}")
        if self._digest(name, header, key, *payload) != seal:
            raise CorruptPart("its content differs from the stored one")
        return Part(kind.decode(), start, end, key, payload, seconds, below.hex())

    def _digest(self, name: str, *pieces: Buffer) -> bytes:
        running = blake3(name.encode() + b"\0", key=self._key)
        for piece in pieces:
            running.update(piece)
        return running.digest(SEAL_BYTES)

"""Protocol of stores: parts by name, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from headwater.errors import HeadwaterError
from headwater.tiers.catalog import Catalog
from headwater.tiers.changes import StoreChanges
from headwater.tiers.part import Buffer

PEER = "peer"  # kind of the memory of other workers


class StoreError(HeadwaterError):
    """A store cannot be read or written. Its parts count as missing."""


class StoreFull(StoreError):
    """A part does not fit, even after eviction."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Content of a store."""

    parts: int
    bytes: int
    limit: int | None  # bytes
    evicted: int = 0  # parts, by this server
    states: Mapping[str, int] = field(default_factory=dict)  # by the tag of their fingerprint


class Store(Protocol):
    """A store of parts. Methods are called from several threads; they raise StoreError."""

    kind: str
    limit: int | None  # bytes
    shown: str  # its place, without a password

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether there is a part. Contents are not read."""

    def get(self, name: str) -> Buffer | None:
        """Return the bytes of a part, which counts as used now; None if it is missing."""

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        """Fill pieces, one after the other, with the bytes of a part; it counts as used now.

        False if it is missing or has another size: the pieces may then have any content.
        """

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        """Store bytes under a new name, whole or not at all; an existing part stays. `keep`: names not to evict.

        Raises StoreFull.
        """

    def touch(self, names: Sequence[str]) -> None:
        """Note that parts were used now; unknown names are ignored."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove parts; unknown names are ignored."""

    def usage(self) -> Usage:
        """Return its usage, without reading parts."""

    def catalog(self) -> Catalog:
        """Return an entry for each part."""

    def close(self) -> None: ...


@runtime_checkable
class OwnStore(Store, Protocol):
    """Store that may be one server's own, which then publishes its content."""

    medium: str  # in KV events
    changes: StoreChanges  # gets the parts that are evicted or deleted here

    def claim(self) -> None:
        """Note that this server publishes the store's content."""

    def is_private(self) -> bool:
        """Return whether only this server has claimed it."""

    def piece(self, name: str, at: int, size: int) -> bytes:
        """Return `size` bytes of a part from `at` on, or as many as there are; it does not count as used."""


class Followed(Protocol):
    """A prefix that another worker computes."""

    def progress(self) -> tuple[int, int] | None:
        """Return its tokens with KV there, and its length if its state is there, else 0.

        None: the worker does not answer.
        """


class PeerStore(Store, Protocol):
    """Memory of other workers of a cluster, which is only read. It has the parts that the asked workers offered."""

    @property
    def bytes_by_way(self) -> tuple[int, int]:
        """Bytes of payloads through shared memory, and over the network."""

    @property
    def reachable(self) -> bool:
        """False: no other worker is known, or each is paused after a failure."""

    def ask(self, peers: Sequence[bytes], namespace: str, key: bytes, tokens: int) -> None:
        """Ask workers, by their incarnations, for parts of a prompt of `tokens` tokens; `has` knows them afterwards.

        `key`: the prompt's, of the index. Workers that are unknown, or do not answer, have nothing.
        """

    def follow(self, peer: bytes, namespace: str, key: bytes, at: int) -> Followed | None:
        """Ask a worker for the parts, now and later, of a prefix of `at` tokens that it computes.

        None: it is unknown, or does not answer. Afterwards `get` and `read_into` know all parts; `has` does not, since
        they may not be there yet.
        """

    def expect(self, peers: Sequence[bytes], key: bytes, name: str) -> None:
        """Assume that the first of these workers that can be asked has a segment with this encoded key and name."""


def filled(content: Buffer | None, pieces: Sequence[memoryview]) -> bool:
    """Copy content into pieces, one after the other; False if it has another size."""
    return content is not None and spread([content], pieces)


def spread(contents: Sequence[Buffer], pieces: Sequence[memoryview]) -> bool:
    """Copy contents, one after the other, into pieces, one after the other; False if they have another size."""
    if sum(map(len, contents)) != sum(map(len, pieces)):
        return False
    left = [memoryview(content) for content in reversed(contents) if len(content)]
    for piece in pieces:
        at = 0
        while at < len(piece):
            view = left.pop()
            n = min(len(view), len(piece) - at)
            piece[at : at + n] = view[:n]
            at += n
            if n < len(view):
                left.append(view[n:])
    return True

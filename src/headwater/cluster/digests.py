"""Digests of prefixes and segments, which stand for them in messages: 64 bits, keyed, by unit of the index key.

Without the key no digest can be computed: messages reveal no prompt, and a guessed prompt cannot be tested. A digest
covers the one before it, and the first one the namespace, so that an edge is hashed without its ancestors.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from headwater.cache.changes import SegmentStored

DIGEST_BYTES = 8  # routers hold 64-bit block hashes
TOKEN_BYTES = 4


class Digests:
    """Digests under one secret key, of units of `unit_bytes`."""

    def __init__(self, key: bytes, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self._unit, self._root, self._segment = (
            hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headwater " + kind)
            for kind in (b"unit", b"root", b"part")
        )

    def root(self, namespace: str) -> int:
        """Return the digest that stands before a prefix's first unit."""
        return _digest(self._root, [namespace.encode(errors="surrogatepass")])

    def after(self, before: int, edge: bytes) -> list[int]:
        """Return the digests of the units of `edge`, which continue a prefix with the digest `before`."""
        digests, width, begun = list[bytes](), self.unit_bytes, self._unit
        running = before.to_bytes(DIGEST_BYTES, "big")
        for at in range(0, len(edge) - width + 1, width):
            unit = begun.copy()
            unit.update(running + edge[at : at + width])
            running = unit.digest()
            digests.append(running)
        return list(struct.unpack(f">{len(digests)}Q", b"".join(digests)))

    def prefix(self, namespace: str, key: bytes) -> list[int]:
        """Return the digest of each prefix of an index key that is 1, 2, … whole units long."""
        return self.after(self.root(namespace), key)

    def prompt(self, tokens: Sequence[int], namespace: str = "") -> list[int]:
        """Return the digests of a prompt's full units."""
        return self.prefix(namespace, array("I", tokens).tobytes())

    def segment(self, stored: SegmentStored) -> int:
        """Return the digest of a segment, which has no place in a prefix."""
        widths = b"".join(width.to_bytes(4, "big") for width in (stored.head, stored.tail))
        return _digest(self._segment, [widths, stored.namespace.encode(errors="surrogatepass"), stored.ids])


def _digest(begun: hashlib.blake2b, parts: Iterable[bytes]) -> int:
    """Return the digest of parts, each after its length, so that no other parts have the same bytes."""
    running = begun.copy()
    for part in parts:
        running.update(len(part).to_bytes(8, "big"))
        running.update(part)
    return int.from_bytes(running.digest(), "big")

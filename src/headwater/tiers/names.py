"""Names of stored parts: keyed digests over the fingerprint, the namespace and the index key up to a part's end.

A segment is named by the digest of its whole key, which has the namespace; a tail by the digest of the prefix before it
and its token ids.

A name has 160 bits, and 32 more of a keyed digest of the fingerprint, by which a store counts the states of each
fingerprint. Without the tier key none can be computed: names reveal no prompt, and a guessed prompt cannot be tested. A
part also holds the index key up to its end, which each read compares: a collision loads nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headwater.errors import ConfigError

KEY_BYTES = 32
DIGEST_BYTES, TAG_BYTES = 20, 4
STATE, RUN = "s", "k"  # kinds of parts: the state at a position, the KV of a run of pages that ends there
SEGMENT = "g"  # all of a segment
ENTRIES = "m"  # entries of the MTP head of a run of KV
TAIL = "t"  # the tokens after a state that are less than a page
FINGERPRINT = "f"  # a fingerprint under which parts are stored
NAME = re.compile(f"[{STATE}{RUN}{SEGMENT}{ENTRIES}{TAIL}{FINGERPRINT}][0-9a-f]+(-[0-9]+)?")
WHOLE = STATE, SEGMENT, TAIL  # kinds that are evicted by their value; KV is evicted with the states above it


def read_key(path: Path, what: str = "tier key") -> bytes:
    """Return the secret key in a file; if it is missing, write a new one with mode 0600. `what`: for errors.

    Raises ConfigError for a file that other users can read, that is not a key, or that cannot be read or written.
    """
    try:
        if not path.exists():
            _write_key(path)
        mode = path.stat().st_mode & 0o777
        text = path.read_text(encoding="ascii").strip()
        key = bytes.fromhex(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the {what} {str(path)!r} cannot be used: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"the {what} {str(path)!r} has mode {mode:o}: other users can read it, must be 600")
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the {what} {str(path)!r} has {len(key)} bytes, must have {KEY_BYTES}")
    return key


def _write_key(path: Path) -> None:
    """Write a new key whole or not at all, and never over one that another server wrote meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES).hex().encode() + b"\n")
        with suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        os.unlink(unfinished)


class Names:
    """Names of the parts of one model as one server computes it."""

    def __init__(self, key: bytes, fingerprint: str, unit_bytes: int) -> None:
        self._begun = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headwater name")
        self._begun.update(_sized(fingerprint.encode()))
        self._segment = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headwater segmt")
        self._segment.update(_sized(fingerprint.encode()))
        self._tail = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headwater tail")
        self._tail.update(_sized(fingerprint.encode()))
        tag = hashlib.blake2b(fingerprint.encode(), digest_size=TAG_BYTES, key=key, person=b"headwater tag")
        self.tag, self._unit_bytes = tag.hexdigest(), unit_bytes

    def digests(self, namespace: str, key: bytes) -> list[str]:
        """Return the digest of each prefix of `key` that is 0, 1, 2, … whole units long."""
        running, width = self._begun.copy(), self._unit_bytes
        running.update(_sized(namespace.encode()))
        digests = [running.hexdigest() + self.tag]
        for at in range(0, len(key) // width * width, width):
            running.update(key[at : at + width])
            digests.append(running.hexdigest() + self.tag)
        return digests

    def segment(self, key: bytes) -> str:
        """Return the name of the segment with this encoded key."""
        running = self._segment.copy()
        running.update(_sized(key))
        return SEGMENT + running.hexdigest() + self.tag

    def tail(self, digest: str, ids: bytes, has_hidden: bool) -> str:
        """Return the name of the tail with these token ids, after a prefix with this digest."""
        running = self._tail.copy()
        running.update(digest.encode() + bytes([has_hidden]) + ids)
        return TAIL + running.hexdigest() + self.tag


def is_name(text: str) -> bool:
    """Return whether a text has the form of a part's name."""
    return NAME.fullmatch(text) is not None


def tag_of(name: str) -> str:
    """Return the tag of the fingerprint under which a part was stored."""
    return name[1:].partition("-")[0][2 * DIGEST_BYTES :]


def state_name(digests: Sequence[str], end: int) -> str:
    """Return the name of the state after `end` units."""
    return STATE + digests[end]


def fingerprint_name(tag: str) -> str:
    """Return the name of the part that stands for a fingerprint."""
    return FINGERPRINT + tag


def run_name(digests: Sequence[str], start: int, end: int) -> str:
    """Return the name of the KV of units [start, end)."""
    return f"{RUN}{digests[end]}-{end - start}"


def entries_name(of: str) -> str:
    """Return the name of the head's entries of the run of KV, or the tail, with this name."""
    return ENTRIES + of[1:]


def runs_of(end: int, length: int) -> list[tuple[int, int]]:
    """Return the runs of `length` units that store the first `end` units; the last one may be shorter."""
    return [(start, min(start + length, end)) for start in range(0, end, length)]


def _sized(content: bytes) -> bytes:
    """Return `content` after its length in 8 bytes, so that two contents in a row cannot be read as two others."""
    return len(content).to_bytes(8, "little") + content

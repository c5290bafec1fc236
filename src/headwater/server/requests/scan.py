"""Scan of a large JSON body while it arrives, so that a body beyond the limits is refused before it is parsed.

A parser would first build all its objects: 60 MB of empty lists take 80 seconds and 3 GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater.server.http.errors import RefusedBody

PIECE_BYTES = 64 * 2**10  # bytes that are scanned without a pause for other requests: at most some milliseconds
MAX_DEPTH = 64  # of nested lists and objects
MAX_BYTES = 16 * 2**20  # of a body: JSON of that size takes about 50 ms, in which no other thread runs
MIN_VALUES, MIN_CONTAINERS = 200_000, 50_000  # accepted whatever the model's length
ID_BYTES = 16  # of a value outside of strings: a token's id takes at most 7, a separator, and some white space
MIN_MESSAGE_TOKENS = 4  # at least, in any chat template: its role and the tokens around it
ESCAPE_BYTES = 6  # bytes of a character's escape, such as \u0041
STRING = re.compile(rb'"[^"]*(?:"|\Z)')
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
DEPTH_STEPS = np.zeros(256, np.int64)  # change of depth at a byte
DEPTH_STEPS[list(b"[{")], DEPTH_STEPS[list(b"]}")] = 1, -1


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body, from the longest prompt that the server takes.

    `values` are all of a JSON text, `containers` its lists and objects; a prompt of token ids has a value a token.
    """

    tokens: int  # of a prompt with its answer
    token_bytes: int | None  # that one token can stand for; None: not bounded
    bytes: int
    values: int
    containers: int

    @staticmethod
    def of(tokens: int, token_bytes: int | None, prompts: int) -> BodyLimits:
        """Derive the limits for requests of at most this many prompts."""
        values = max(MIN_VALUES, 2 * tokens)
        containers = max(MIN_CONTAINERS, tokens // MIN_MESSAGE_TOKENS)
        size = MAX_BYTES
        if token_bytes is not None:
            size = min(MAX_BYTES, ID_BYTES * values + ESCAPE_BYTES * prompts * tokens * token_bytes)
        return BodyLimits(tokens, token_bytes, size, values, containers)


class BodyScan:
    """State of the scan of one body. Bodies that are not JSON pass, for the parser to describe the error."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._carried = b""  # a backslash, whose character is in the next piece
        self._in_string = False
        self._depth = self._outside = self._values = self._containers = 0
        self._text = 0  # bytes of the open string, or somewhat fewer

    def take(self, chunk: bytes) -> Iterator[None]:
        """Scan the next bytes of the body, and yield after each piece. Raises RefusedBody beyond a limit."""
        for start in range(0, len(chunk), PIECE_BYTES):
            self._take(chunk[start : start + PIECE_BYTES])
            yield

    def _take(self, piece: bytes) -> None:
        piece = self._carried + piece
        end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece, self._carried = piece[:end], piece[end:]
        escapes = 0
        if b"\\" in piece:
            escapes = piece.count(b"\\")
            piece = piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
        outside = STRING.sub(b"", b'"' + piece if self._in_string else piece)
        self._in_string ^= piece.count(b'"') % 2 == 1
        self._measure_text(piece, escapes)
        self._count(outside)

    def _measure_text(self, piece: bytes, escapes: int) -> None:
        last = piece.rfind(b'"')
        if not self._in_string:
            self._text = 0
            return
        begun = self._text if last < 0 else 0
        size = len(piece) - (last + 1)  # of which an escape may be cut at its start
        self._text = begun + max(size - (ESCAPE_BYTES - 1) * (escapes + 1), size // ESCAPE_BYTES - 1, 0)
        limits = self._limits
        if limits.token_bytes is not None and self._text > limits.tokens * limits.token_bytes:
            found = (
                f"body has a text of {self._text:,} bytes or more, at least {self._text // limits.token_bytes:,} tokens"
            )
            raise RefusedBody(f"{found}; {limits.tokens:,} are accepted with the answer", "context_length_exceeded")

    def _count(self, outside: bytes) -> None:
        limits = self._limits
        brackets = outside.translate(None, NO_BRACKETS)
        if brackets:
            depths = self._depth + np.cumsum(DEPTH_STEPS[np.frombuffer(brackets, np.uint8)])
            self._depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                raise too_deep()
        opened = brackets.count(b"[") + brackets.count(b"{")
        self._containers += opened
        self._values += opened + outside.count(b",")
        self._outside += len(outside)
        for name, found, most in (
            ("lists and objects", self._containers, limits.containers),
            ("values", self._values, limits.values),
            ("bytes outside of texts", self._outside, ID_BYTES * limits.values),
        ):
            if found > most:
                raise RefusedBody(f"body has {found:,} {name} or more, at most {most:,} are accepted")


def too_deep() -> RefusedBody:
    """Return the error for a body that is nested too deep."""
    return RefusedBody(f"body has lists and objects nested more than {MAX_DEPTH} deep, which is the limit")

"""A recorded file, read as a stream: plain, gzip or zstd, JSON lines or one JSON array."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from headwater.errors import TraceError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # RFC 1952, section 2.3.1; RFC 8878, section 3.1.1
# what a record leads to that has not what it should
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
CHUNK = 1 << 20  # bytes read at once
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
BETWEEN = re.compile(r"[\s,]*")


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, unpacked. Its first bytes tell what it is packed with."""
    file = path.open("rb")
    magic = file.read(4)
    file.seek(0)
    if magic == ZSTD:
        unpacked = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
            file, read_across_frames=True, closefd=True
        )
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, unpacked), CHUNK))
    if magic[:2] == GZIP:
        return cast(BinaryIO, gzip.open(file))
    return file


class Source:
    """The records of one file. `place` tells which of them was given out last, for errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = "line 1"

    def lines(self) -> Iterator[bytes]:
        """Lines that are not empty."""
        with open_bytes(self.path) as file:
            for number, line in enumerate(self._readable(iter(file)), 1):
                self.place = f"line {number:,}"
                if not line.isspace():
                    yield line

    def records(self) -> Iterator[Any]:
        """The JSON value of each line, or each element of the one array that the file is."""
        with open_bytes(self.path) as file:
            head = next(self._readable(iter(lambda: file.read(4096), b"")), b"")
        if ARRAY_OF_OBJECTS.match(head):
            yield from self._elements()
        else:
            yield from map(self.parsed, self.lines())

    def parsed(self, line: bytes) -> Any:
        """A line's value. Raises TraceError where it is no JSON."""
        try:
            return json.loads(line)
        except ValueError as error:
            raise self.error(f"no JSON: {error}") from error

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.path}, {self.place}: {what}")

    def malformed(self, error: Exception) -> TraceError:
        """The place, and what one of MALFORMED says of it."""
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return self.error(f"no request that is known: {what}")

    def _readable(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise TraceError(f"{self.path}, after {self.place}: cannot be unpacked: {error}") from error

    def _elements(self) -> Iterator[Any]:
        """The elements of an array; no more than one of them is held, or a chunk of the file if that is longer."""
        decoder = json.JSONDecoder()
        with open_bytes(self.path) as file:
            chunks = codecs.iterdecode(self._readable(iter(lambda: file.read(CHUNK), b"")), "utf-8", "replace")
            text, at, number = "", 0, 0
            while True:
                try:
                    at = cast(re.Match[str], BETWEEN.match(text, at if number else text.find("[") + 1)).end()
                    if text.startswith("]", at):
                        return
                    element, at = decoder.raw_decode(text, at)
                except ValueError as error:
                    added = next(chunks, "")
                    if not added:
                        raise self.error(f"then no JSON: {error}") from error
                    text, at = text[at:] + added, 0
                    continue
                number += 1
                self.place = f"element {number:,}"
                yield element

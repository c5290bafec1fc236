"""Recorded files: found by name, and read as a stream: plain, gzip, zstd or Parquet, JSON lines or one JSON value."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from headwater.errors import TraceError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # RFC 1952, section 2.3.1; RFC 8878, section 3.1.1
# raised by reading a malformed record
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
CHUNK_BYTES, HEAD_BYTES = 1 << 20, 1 << 16  # of a read
PARQUET, PARQUET_ROWS = b"PAR1", 1024  # read at once
ENDINGS = {".jsonl", ".json", ".csv", ".trace", ".traj", ".log", ".parquet"}  # of traces, .zst or .gz aside
ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
OBJECT_OF_LINES = re.compile(rb"\s*\{\s*\n")  # one JSON value over several lines
BETWEEN = re.compile(r"[\s,]*")
NO_DATA = ", and no folder of traces is given (--data FOLDER); drawn traffic has options in brackets: generated(0)"


def files_of(folder: Path) -> list[Path]:
    """Return the traces in a folder and in all below it, by name."""
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and ENDINGS & set(file.suffixes)]


def find(path: Path, data: Path | None = None) -> Path:
    """Return the file of that name, also below `data`, also without its endings, or the only trace of a folder.

    Raises TraceError if there is none, or more than one.
    """
    for candidate in (path, *([data / path] if data is not None else ())):
        found = _files(candidate)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(sorted(stem(file) for file in found))
            raise TraceError(f"{candidate} is {len(found)} files, must be one of {names}")
    more = NO_DATA if data is None else f", nor is there one below {data}"
    raise TraceError(f"{path} is not a file{more}")


def stem(path: Path) -> str:
    """Return the name without any endings."""
    return path.name.partition(".")[0]


def name_of(path: Path) -> str:
    """Return the path as the user wrote it, without endings; of a path from elsewhere, its last part."""
    far = path.is_absolute() or ".." in path.parts
    return stem(path) if far else (path.parent / stem(path)).as_posix()


def _files(path: Path) -> list[Path]:
    """Return the file itself, or a folder's traces, or the trace of that name, or the traces that begin with it."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _traces(path, lambda name: True)
    if not path.parent.is_dir():
        return []
    exact = _traces(path.parent, lambda name: name == path.name)
    return exact or _traces(path.parent, lambda name: name.startswith(path.name))


def _traces(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    return [file for file in files if wanted(stem(file)) and ENDINGS & set(file.suffixes)]


def open_bytes(path: Path) -> BinaryIO:
    """Open a file and decompress it, by the format that its first bytes show."""
    file = path.open("rb")
    magic = file.read(4)
    file.seek(0)
    if magic == ZSTD:
        unpacked = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
            file, read_across_frames=True, closefd=True
        )
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, unpacked), CHUNK_BYTES))
    if magic[:2] == GZIP:
        return cast(BinaryIO, gzip.open(file))
    return file


class Source:
    """Records of one file. `place` names the last one that was read, for errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = "line 1"

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are not empty."""
        with open_bytes(self.path) as file:
            for number, line in enumerate(self._readable(iter(file)), 1):
                self.place = f"line {number:,}"
                if not line.isspace():
                    yield line

    def records(self) -> Iterator[Any]:
        """Yield the JSON value of each line, each element of a JSON array, each row, or the file's only value."""
        head = self.head()
        if head.startswith(PARQUET):
            yield from self._rows()
        elif ARRAY_OF_OBJECTS.match(head):
            yield from self._elements()
        elif OBJECT_OF_LINES.match(head):
            with open_bytes(self.path) as file:
                yield self.parsed(b"".join(self._readable(iter(lambda: file.read(CHUNK_BYTES), b""))))
        else:
            yield from map(self.parsed, self.lines())

    def head(self) -> bytes:
        """Return the beginning of the file's contents."""
        with open_bytes(self.path) as file:
            return next(self._readable(iter(lambda: file.read(HEAD_BYTES), b"")), b"")

    def first(self) -> Any:
        """Return the first record, or the beginning of a file that is not JSON. Raises StopIteration if it is empty."""
        try:
            return next(self.records())
        except TraceError:
            head = self.head()
            if head.startswith(PARQUET) or head.lstrip()[:1] in (b"{", b"["):
                raise
            return head

    def parsed(self, line: bytes) -> Any:
        """Return a line's value. Raises TraceError if it is not JSON."""
        try:
            return json.loads(line)
        except ValueError as error:
            raise self.error(f"no JSON: {error}") from error

    def error(self, what: str) -> TraceError:
        """Return an error that names the file and the place."""
        return TraceError(f"{self.path}, {self.place}: {what}")

    def malformed(self, error: Exception) -> TraceError:
        """Return an error for one of MALFORMED."""
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return self.error(f"no request that is known: {what}")

    def _readable(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise TraceError(f"{self.path}, after {self.place}: cannot be unpacked: {error}") from error

    def _rows(self) -> Iterator[Any]:
        try:
            from pyarrow import ArrowException  # an extra
            from pyarrow.parquet import ParquetFile
        except ModuleNotFoundError as error:
            raise self.error("Parquet is read by pyarrow: pip install 'headwater[parquet]'") from error
        number = 0
        try:
            for batch in ParquetFile(self.path).iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    self.place = f"row {number:,}"
                    yield row
        except (ArrowException, OSError) as error:
            raise self.error(f"not a whole file of Parquet: {error}") from error

    def _elements(self) -> Iterator[Any]:
        """Yield the elements of an array; memory holds one of them, or a chunk of the file if that is longer."""
        decoder = json.JSONDecoder()
        with open_bytes(self.path) as file:
            chunks = codecs.iterdecode(self._readable(iter(lambda: file.read(CHUNK_BYTES), b"")), "utf-8", "replace")
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

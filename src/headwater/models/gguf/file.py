"""Header of a GGUF file: its metadata, and the place, shape and type of each tensor. No torch.

The format: github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from headwater.errors import CheckpointError
from headwater.hub_name import GGUF_PART
from headwater.unreadable import why_no_gguf

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless the metadata gives another
STRING, ARRAY, FLOAT32, BOOL = 8, 9, 6, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", FLOAT32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a GGUF file: its shape, outputs first, the number of its type, its file, and its first byte there."""

    shape: tuple[int, ...]
    type: int
    file: Path
    start: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and table of tensors of a GGUF file, or of the parts of one."""

    path: Path  # of the first part
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """Name of the model family in llama.cpp: `qwen35`."""
        return str(self.need("general.architecture"))

    def need(self, key: str) -> Any:
        """Return a value of the metadata. Raises CheckpointError if the key is missing."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.path}: key {key!r} is missing from the metadata")
        return self.metadata[key]

    def numbers(self, name: str) -> list[float]:
        """Return a small tensor; an empty list if there is none. Raises CheckpointError unless it is of float32."""
        if name not in self.tensors:
            return []
        place = self.tensors[name]
        with place.file.open("rb") as file:
            file.seek(place.start)
            content = file.read(4 * prod(place.shape))
        if place.type != 0 or len(content) < 4 * prod(place.shape):
            raise CheckpointError(f"{place.file}: tensor {name!r} is cut off or not of float32")
        return [*struct.unpack(f"<{prod(place.shape)}f", content)]


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a file, by its name: NAME-00001-of-00003.gguf and so on; of another name only itself."""
    found = GGUF_PART.fullmatch(path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{i:05}-of-{found[2]}.gguf") for i in range(1, int(found[2]) + 1)]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file, which may be any part of one. Raises CheckpointError if one is missing or broken."""
    parts = parts_of(path)
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path}: {part.name} is missing, one of {len(parts)} parts: download it as well")
    try:
        return _read_headers(tuple((part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error


@lru_cache(maxsize=2)
def _read_headers(parts: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    """Read the headers of all parts as one: metadata are the first part's."""
    headers = [_read_header(path, size) for path, _, size in parts]
    for i, header in enumerate(headers):
        place, n = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1
        if (place, n) != (i, len(parts)):
            raise CheckpointError(
                f"{header.path}: it is part {place + 1} of {n} by its metadata: keep the names of parts that "
                f"llama-gguf-split gives, NAME-{place + 1:05}-of-{n:05}.gguf"
            )
    tensors = {name: place for header in headers for name, place in header.tensors.items()}
    return GgufHeader(headers[0].path, headers[0].metadata, tensors)


def _read_header(path: Path, size: int) -> GgufHeader:
    if size < len(MAGIC):
        raise CheckpointError(f"{path}: its {size} bytes are not a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[: len(MAGIC)] != MAGIC:
            raise CheckpointError(f"{path}: it is not a GGUF file: {why_no_gguf(path)}")
        try:
            return _parse(path, _Cursor(content))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{path}: the header of its {size:,} bytes is cut off or broken: {error}") from error


class _Cursor:
    """Position in the bytes of a file, from which values are read."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, len(MAGIC)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self.content, self.at)
        self.at += struct.calcsize(kind)
        return _shortest(value) if kind == "f" else value

    def text(self) -> str:
        end = self.at + 8 + self.number("Q")
        if end > len(self.content):
            raise IndexError(f"a text ends at byte {end:,}")
        text = self.content[self.at : end].decode("utf-8", "surrogateescape")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in NUMBERS:
            raise IndexError(f"a value is of type {kind}, which is none")
        return self.number(NUMBERS[kind])

    def array(self) -> list[Any]:
        kind, n = self.number("I"), self.number("Q")
        if kind not in NUMBERS:
            self._check_room(n, 8)
            read: Callable[[], Any] = self.text if kind == STRING else lambda: self.value(kind)
            return [read() for _ in range(n)]
        size = struct.calcsize(NUMBERS[kind])
        self._check_room(n, size)
        values = list(struct.unpack_from(f"<{n}{NUMBERS[kind]}", self.content, self.at))
        self.at += n * size
        return values

    def _check_room(self, n: int, size: int) -> None:
        if self.at + n * size > len(self.content):
            raise IndexError(f"an array of {n:,} values starts at byte {self.at:,}")


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.number("I")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not one of {VERSIONS}")
    n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(n_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    table = [_place(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: key 'general.alignment' is {alignment!r}, must be a number of bytes")
    first = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorPlace(shape, kind, path, first + start) for name, shape, kind, start in table}
    return GgufHeader(path, metadata, tensors)


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, its shape, the number of its type, and its first byte after the header."""
    name, n = cursor.text(), cursor.number("I")
    if n > MAX_DIMENSIONS:
        raise IndexError(f"tensor {name!r} has {n} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(n))
    if not 0 < prod(shape) <= len(cursor.content) * 8:
        raise IndexError(f"tensor {name!r} has shape {list(shape[::-1])}")
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _shortest(value: float) -> float:
    """Return the shortest decimal number that float32 rounds to this value: 1e-06 for 9.99999997e-07."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 9))
    return next((float(t) for t in texts if struct.pack("<f", float(t)) == struct.pack("<f", value)), value)

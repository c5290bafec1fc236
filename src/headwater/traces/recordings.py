"""Recordings of `headwater serve --record`, and their reader: keyed page hashes, lengths, boundaries, times.

A line is a request; the first line has the page size. A page's hash covers all tokens up to its end, in one
namespace: equal hashes within one recording are equal prefixes, and hashes of different recordings cannot be compared.
The key is stored in no file, so that a guessed text cannot be verified by its hash. A segment has a hash of its own
tokens (since version 2).
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Any

from headwater.request import Boundaries
from headwater.traces.chat import fidelity_of, spans_of
from headwater.traces.reader import Reader, finite, has, whole
from headwater.traces.request import BLOCK_BYTES, Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

MARK, VERSIONS = "headwater_recording", (1, 2)  # versions that are read; the last is written
PARTS = ("system_end", "query_start", "query_end")
NAMED = ("model", "config", "dtype", "weights", "placement", "eviction")  # of the first line


@dataclass(frozen=True, slots=True)
class PageHashes:
    """Hashes of prefixes (BLAKE2b with a key, RFC 7693), 8 bytes each."""

    key: bytes
    page_size: int  # tokens

    def of(self, namespace: str, tokens: Sequence[int]) -> bytes:
        """Return the hashes of all full pages, concatenated."""
        ids, page = array("i", tokens).tobytes(), self.page_size * 4
        hashes = [self._hash(b"pages " + namespace.encode(errors="surrogatepass"))]
        for end in range(page, len(ids) + 1, page):
            hashes.append(self._hash(hashes[-1] + ids[end - page : end]))
        return b"".join(hashes[1:])

    def segment(self, namespace: str, tokens: Sequence[int]) -> str:
        """Return the hash of a segment's tokens, independent of their position."""
        space = self._hash(b"segments " + namespace.encode(errors="surrogatepass"))
        return self._hash(space + array("i", tokens).tobytes()).hex()

    def name(self, namespace: str) -> str:
        """Return the hash of a namespace's name; "" for the default namespace."""
        return self._hash(b"name " + namespace.encode(errors="surrogatepass")).hex() if namespace else ""

    def _hash(self, text: bytes) -> bytes:
        return blake2b(text, key=self.key, digest_size=BLOCK_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Served:
    """The server that wrote a recording. Recordings of version 0.1.0 have no more than the first two fields."""

    page_size: int
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # the model's config.json
    dtype: str = ""
    placement: str = ""
    eviction: str = ""
    weights: str = ""

    def first_line(self) -> bytes:
        """Return the first line of a recording."""
        return _line({MARK: VERSIONS[-1], **{name: value for name, value in asdict(self).items() if value}})

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> Served:
        """Read the first line of a recording. Raises KeyError, TypeError or ValueError if it is malformed."""
        if head[MARK] not in VERSIONS:
            raise ValueError(f"the recording has version {head[MARK]}, must be one of {VERSIONS}")
        return cls(whole(head, "page_size"), **{name: head[name] for name in NAMED if name in head})


def line_of(request: Request, segments: Sequence[str] = ()) -> bytes:
    """Return the line of a request whose text is page hashes. segments: its segments' hashes."""
    known = {name: at for name in PARTS if (at := getattr(request.boundaries, name)) is not None}
    optional = {"namespace": request.namespace, "extra": request.boundaries.extra, **known}
    lengths = {"in": request.prompt_tokens, "out": request.output_tokens, "known": request.known_tokens}
    left = {name: value for name, value in optional.items() if value or value == 0}
    record = {"t": request.at, **lengths, **left}
    if request.segments:
        named = [[span.start, span.end, name] for span, name in zip(request.segments, segments, strict=True)]
        record |= {"segments": named, "fidelity": request.fidelity}
    return _line({**record, "pages": request.text.hex()})


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded request: its text is page hashes, with the hash of each of its segments."""

    request: Request
    hashes: tuple[str, ...] = ()


def as_tokens(requests: Sequence[Recorded], page: int) -> Iterator[Request]:
    """Yield each request with token ids instead of page hashes, which segments need.

    All tokens of one page get one id, and so do those of one segment, wherever it stands; those after the last full
    page equal no others. So equal prefixes of whole pages, and equal segments, have equal ids.
    """
    ids: defaultdict[tuple[str, object], int] = defaultdict(count().__next__)
    for number, one in enumerate(requests):
        request = one.request
        pages = request.known_tokens // page
        hashes = (request.text[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(pages))
        text: array[int] = array("i")
        for prefix in hashes:
            text += array("i", [ids[request.namespace, prefix]]) * page
        text += array("i", [ids["", number]]) * (request.known_tokens - pages * page)
        for span, name in zip(request.segments, one.hashes, strict=True):
            text[span.start : span.end] = array("i", [ids["segment", name]]) * (span.end - span.start)
        yield replace(request, text=text.tobytes())


class Recordings(Reader):
    """Reader of recordings. Requests are in the order of arrival, lines in the order of completion."""

    about = "hashes of pages, no text"
    fields = ("headwater_recording", "page_size", "model", "config", "dtype", "placement", "eviction")
    block_tokens = 0  # as the first line says
    has_token_ids = False

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._torn = False
        self._page = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, MARK)

    def requests(self, source: Source) -> Iterator[Request]:
        lines = source.lines()
        head = source.parsed(next(lines))
        self.block_tokens = self._page = Served.of(head).page_size
        read = [self._recorded(source.parsed(line), number) for number, line in enumerate(self._whole(lines))]
        read.sort(key=lambda one: one.request.at or 0.0)
        if any(one.hashes for one in read):
            self.block_tokens = 1
            yield from as_tokens(read, self._page)
        else:
            yield from (one.request for one in read)

    def notes(self) -> tuple[str, ...]:
        torn = ["the last line was not complete: the server was killed as it wrote it"] if self._torn else []
        return (f"pages of {self._page} tokens: only full ones count", *torn)

    def _whole(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._torn = not line.endswith(b"\n")  # of the last one only
            if not self._torn:
                yield line

    def _recorded(self, line: dict[str, Any], number: int) -> Recorded:
        request, told = self._request(line, number), line.get("segments") or ()
        spans = spans_of({"segments": [one[:2] for one in told]}, request.prompt_tokens)
        request = replace(request, segments=spans, fidelity=fidelity_of(line))
        return Recorded(request, tuple(str(one[2]) for one in told))

    def _request(self, line: dict[str, Any], number: int) -> Request:
        pages, known = bytes.fromhex(line["pages"]), whole(line, "known")
        if len(pages) != known // self._page * BLOCK_BYTES:
            raise ValueError(f"pages has {len(pages):,} bytes, known is {known:,}: must be {BLOCK_BYTES} a page")
        system_end, query_start, query_end = (whole(line, name) if name in line else None for name in PARTS)
        extra = tuple(whole({"extra": at}, "extra") for at in line.get("extra", ()))
        parts = Boundaries(system_end, query_start, query_end, extra)
        lengths = whole(line, "in"), whole(line, "out"), known
        if not 0 < lengths[0] <= known:
            raise ValueError(f"in is {lengths[0]:,}, must be from 1 to known, which is {known:,}")
        return Request(str(number), pages, *lengths, finite(line["t"], "t"), None, parts, line.get("namespace", ""))

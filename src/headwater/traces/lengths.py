"""Recordings of lengths without content: rows of CSV files, and texts for them whose tokens are never sent twice."""

from __future__ import annotations

import csv
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

from headwater.traces.reader import Reader
from headwater.traces.request import Request
from headwater.traces.source import Source

BLOCK_TOKENS = 64  # of the texts


@dataclass(frozen=True, slots=True)
class Point:
    """Time and lengths of one request."""

    at: float  # seconds from the recording's beginning
    input_tokens: int
    output_tokens: int
    session: str = ""  # "": a request by itself


@dataclass(slots=True)
class _Text:
    ids: array[int] = field(default_factory=lambda: array("q"))
    packed: bytes = b""


class InferredTexts:
    """Texts of requests of which only lengths are known, in blocks: a request shares the beginning that is stated."""

    def __init__(self) -> None:
        self._new = count()
        self._texts: dict[str, _Text] = {}  # by session: the text of its last request
        self._asked: list[tuple[Request, _Text]] = []

    def add(self, request: Request, shared_tokens: int) -> None:
        """Add a request without text, whose first `shared_tokens` are those of its session's request before."""
        shared, blocks = shared_tokens // BLOCK_TOKENS, request.known_tokens // BLOCK_TOKENS
        text = self._texts.get(request.session)
        if text is None or len(text.ids) != shared:
            text = self._texts[request.session] = _Text(text.ids[:shared] if text else array("q"))
        text.ids.extend(next(self._new) for _ in range(blocks - len(text.ids)))
        self._asked.append((request, text))

    def requests(self) -> Iterator[Request]:
        """Yield all requests in the order of `add`."""
        for request, text in self._asked:
            text.packed = text.packed or text.ids.tobytes()
            yield replace(request, text=text.packed)


class LengthRows(Reader):
    """Reader of a CSV with a request a row, in the order of arrival."""

    block_tokens = BLOCK_TOKENS
    has_token_ids = False
    interleaved = True
    head: ClassVar[bytes]  # with which the file begins

    @classmethod
    def matches(cls, first: Any) -> bool:
        return isinstance(first, bytes) and first.startswith(cls.head)

    @classmethod
    def read(cls, source: Source, seed: int = 0) -> Iterator[Point]:
        """Yield the requests as points; nothing is drawn."""
        begin: float | None = None
        for row in csv.DictReader(line.decode() for line in source.lines()):
            point = cls.point(row)
            begin = point.at if begin is None else begin
            yield replace(point, at=point.at - begin)

    @staticmethod
    @abstractmethod
    def point(row: Mapping[str, str]) -> Point:
        """Return a row's request, at its time in seconds."""

    def requests(self, source: Source) -> Iterator[Request]:
        texts, before = InferredTexts(), dict[str, Point]()
        for number, point in enumerate(self.read(source), 1):
            last = before.get(point.session) if point.session else None
            session = point.session or f"line {number}"
            # a conversation's next prompt has the one before, and its answer, if it is long enough for both
            known = point.input_tokens + point.output_tokens
            held = 0 if last is None else last.input_tokens + last.output_tokens
            texts.add(
                Request(session, b"", point.input_tokens, point.output_tokens, known, point.at),
                held if held <= point.input_tokens else 0,
            )
            before[point.session] = point
        yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        return ("lengths only: a prompt shares text only with its session's prompt before, if it is longer",)

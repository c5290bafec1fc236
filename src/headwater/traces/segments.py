"""Segments of a prompt, as marked by its request (docs/segments.md)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.config import DEFAULT_SEPARATOR
from headwater.request import Fidelity, Span
from headwater.traces.tokens import Tokens

MARKUP = ("system", "developer", "user")  # roles whose contents separators divide


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is tokenised by itself."""

    text: str
    segment: bool = False


def pieces_of(message: Mapping[str, Any]) -> list[Piece]:
    """Return a message's content in pieces: texts between separators, and parts marked so, are segments."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    found: list[Piece] = []
    pending, opened = "", False
    for part in parts:
        text = part if isinstance(part, str) else str(part.get("text") or "")
        marked = None if isinstance(part, str) else part.get("segment")
        if marked:
            found += [Piece(pending), Piece(text, True)]
            pending, opened = "", False
        elif marked is None and message.get("role") in MARKUP:
            before, *after = text.split(DEFAULT_SEPARATOR)
            pending += before
            for piece in after:
                found.append(Piece(pending, opened))
                pending, opened = piece, True
        else:
            pending += text
    return [piece for piece in (*found, Piece(pending)) if piece.text]


def pieces_of_prompt(prompt: str) -> list[Piece]:
    """Return a completion's prompt in pieces. If it begins with a separator, its first segment is the leading part."""
    pieces = [piece for piece in pieces_of({"role": "user", "content": prompt}) if piece.text]
    return [Piece(pieces[0].text), *pieces[1:]] if prompt.startswith(DEFAULT_SEPARATOR) and pieces else pieces


def documents_of(asked: Mapping[str, Any]) -> list[Piece]:
    """Return the pieces before the user's last message: each document with its title is a segment."""
    documents = asked.get("documents") or ()
    return [Piece(document_text(document["text"], document.get("title")), True) for document in documents]


def document_text(text: str, title: str | None) -> str:
    """Return a document as a prompt contains it."""
    return f"{title}\n{text}\n\n" if title else f"{text}\n\n"


def encoded(tokens: Tokens, pieces: Iterable[Piece]) -> tuple[array[int], tuple[Span, ...]]:
    """Return the tokens of all pieces, concatenated, and the spans of the segments."""
    ids: array[int] = array("i")
    spans = []
    for piece in pieces:
        start = len(ids)
        ids += tokens.of(piece.text)
        if piece.segment and len(ids) > start:
            spans.append(Span(start, len(ids)))
    return ids, tuple(spans)


def spans_of(record: Mapping[str, Any], length: int) -> tuple[Span, ...]:
    """Return the spans of a record's `segments` [[start, end], ...]; none if the record has `exact`.

    Raises ValueError unless they are in order, disjoint, not empty, and within `length` tokens.
    """
    spans = tuple(_spans(record.get("segments") or (), length))
    return () if record.get("exact") else spans


def fidelity_of(record: Mapping[str, Any]) -> Fidelity:
    """Return a record's fidelity. Raises ValueError for an unknown one."""
    return Fidelity(record.get("fidelity") or Fidelity.BALANCED)


def _spans(pairs: Iterable[Sequence[int]], length: int) -> Iterator[Span]:
    last = 0
    for number, pair in enumerate(pairs):
        start, end = pair
        if not (isinstance(start, int) and isinstance(end, int) and last <= start < end <= length):
            raise ValueError(f"segment {number} is {list(pair)}, must be two positions from {last:,} to {length:,}")
        last = end
        yield Span(start, end)

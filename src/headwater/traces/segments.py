"""Segments of a prompt, as marked by its request (docs/segments.md)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.config import DEFAULT_SEPARATOR
from headwater.request import Fidelity, Span
from headwater.traces.tokens import Tokens

MARKUP = ("system", "developer", "user")  # whose contents separators delimit in


@dataclass(frozen=True, slots=True)
class Piece:
    """A text that is tokenised by itself."""

    text: str
    segment: bool = False


def pieces_of(message: Mapping[str, Any]) -> list[Piece]:
    """A message's content: what stands between separators, or in parts that say so, is a segment."""
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
    """A completion's prompt. One that begins with a separator has its first segment as the leading part."""
    pieces = [piece for piece in pieces_of({"role": "user", "content": prompt}) if piece.text]
    return [Piece(pieces[0].text), *pieces[1:]] if prompt.startswith(DEFAULT_SEPARATOR) and pieces else pieces


def documents_of(asked: Mapping[str, Any]) -> list[Piece]:
    """Return the pieces before the user's last message: each document with its title is a segment."""
    documents = asked.get("documents") or ()
    return [Piece(document_text(document["text"], document.get("title")), True) for document in documents]


def document_text(text: str, title: str | None) -> str:
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
    """`segments` [[start, end], ...] of a prompt of `length` tokens; none where it asks for `exact`.

    Raises ValueError for what is no such list: in order, each with a token, and none over another.
    """
    spans = tuple(_spans(record.get("segments") or (), length))
    return () if record.get("exact") else spans


def fidelity_of(record: Mapping[str, Any]) -> Fidelity:
    """Raises ValueError for one that is unknown."""
    return Fidelity(record.get("fidelity") or Fidelity.BALANCED)


def _spans(pairs: Iterable[Sequence[int]], length: int) -> Iterator[Span]:
    last = 0
    for number, pair in enumerate(pairs):
        start, end = pair
        if not (isinstance(start, int) and isinstance(end, int) and last <= start < end <= length):
            raise ValueError(f"segment {number} is {list(pair)}, must be two positions from {last:,} to {length:,}")
        last = end
        yield Span(start, end)

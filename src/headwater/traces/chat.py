"""Conversations as tokens: each message is tokenised once, and a conversation's requests share one text."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.config import DEFAULT_SEPARATOR
from headwater.request import Boundaries, Fidelity, Span
from headwater.traces.request import Request
from headwater.traces.tokens import Tokens

MARKUP = ("system", "developer", "user")  # roles whose contents separators divide
Message = Mapping[str, Any]


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


class Chat:
    """Messages one after the other, as a template that only ever appends writes them.

    A prompt for messages[:n] ends with the header of the assistant's answer. Boundaries are those that the server's
    probes find for such a template: one token before the first user's text, before the last user's, and before the end.
    """

    def __init__(self, tokens: Tokens, messages: Sequence[Message] = ()) -> None:
        self._tokens = tokens
        self._ids: array[int] = array("i")
        self._starts: list[int] = []  # of each message, where its text begins
        self._ends: list[int] = []  # one past the mark that ends it
        self._users: list[int] = []
        self._segments: list[Span] = []
        for message in messages:
            self.say(message)

    def say(self, message: Message, before: Sequence[Piece] = ()) -> None:
        """Append a message, with documents in front of it."""
        pieces = [*before, *pieces_of(message)]
        if any(piece.segment for piece in pieces):
            self.add(str(message["role"]), *encoded(self._tokens, [*pieces, Piece(_calls_of(message))]))
        else:
            self.add(str(message["role"]), self._tokens.of(text_of(message)))

    def add(self, role: str, content: array[int], segments: Sequence[Span] = ()) -> None:
        """Append a message of tokens. segments: spans of its content."""
        if role == "user":
            self._users.append(len(self._starts))
        self._ids += self._tokens.header(role)
        at = len(self._ids)
        self._starts.append(at)
        self._segments += [Span(at + span.start, at + span.end) for span in segments]
        self._ids += content
        self._ends.append(len(self._ids) + 1)
        self._ids += self._tokens.footer()

    def text(self) -> bytes:
        """Tokens of all messages, shared by all requests of this conversation."""
        return self._ids.tobytes()

    def request(self, session: str, text: bytes, reply: int, at: float | None = None) -> Request:
        """Return the request that message `reply` answers. text: the result of text(), shared by all requests."""
        start, end = self._starts[reply], self._ends[reply]
        parts = self._boundaries(reply, start)
        return Request(session, text, start, end - start, end, at, boundaries=parts, segments=self.segments(start))

    def asked(self) -> tuple[bytes, Boundaries]:
        """Return text and boundaries of a prompt of all messages, whose answer is not among them."""
        ids = self._ids + self._tokens.header("assistant")
        return ids.tobytes(), self._boundaries(len(self._starts), len(ids))

    def segments(self, end: int) -> tuple[Span, ...]:
        """Return the segments within the first `end` tokens."""
        return tuple(span for span in self._segments if span.end <= end)

    def beginning(self) -> bytes:
        """Return the text up to the end of the first user's message, or of the first message."""
        first = self._users[0] if self._users else 0
        return self._ids[: self._ends[first]].tobytes()

    def _boundaries(self, reply: int, length: int) -> Boundaries:
        before = bisect_left(self._users, reply)
        if not before:
            return Boundaries(query_end=length - 1)
        first, last = self._users[0], self._users[before - 1]
        return Boundaries(self._starts[first] - 1, self._starts[last] - 1, length - 1)


def text_of(message: Message) -> str:
    """Return the text of a message as a template writes it: its text, its parts' text, its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content + _calls_of(message)


def _calls_of(message: Message) -> str:
    calls = message.get("tool_calls")
    return json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else ""

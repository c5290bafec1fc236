"""Conversations as tokens: each message is tokenised once, and a conversation's requests share one text."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.request import Boundaries, Span
from headwater.traces.request import Request
from headwater.traces.segments import Piece, encoded, pieces_of
from headwater.traces.tokens import Tokens

Message = Mapping[str, Any]


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

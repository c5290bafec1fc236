"""A conversation as tokens: each message is tokenised once, and its requests share one text."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.traces.request import Request
from headwater.traces.tokens import Tokens
from headwater.types import Boundaries

Message = Mapping[str, Any]


class Chat:
    """Messages one after the other, as a template that only ever appends writes them.

    A prompt for messages[:n] ends with the header of the assistant's answer. Boundaries are those that the server's
    probes find for such a template: one token before the first user's text, before the last user's, and before the end.
    """

    def __init__(self, tokens: Tokens, messages: Sequence[Message]) -> None:
        self._tokens = tokens
        self._ids: array[int] = array("i")
        self._starts: list[int] = []  # of each message, where its text begins
        self._ends: list[int] = []  # one past the mark that ends it
        self._users: list[int] = []
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        role = str(message["role"])
        if role == "user":
            self._users.append(len(self._starts))
        self._ids += self._tokens.header(role)
        self._starts.append(len(self._ids))
        self._ids += self._tokens.of(text_of(message))
        footer = self._tokens.footer()
        self._ids += footer
        self._ends.append(len(self._ids) - len(footer) + 1)

    def text(self) -> bytes:
        """Of all messages: what all requests of this conversation share."""
        return self._ids.tobytes()

    def request(self, session: str, text: bytes, reply: int, at: float | None = None) -> Request:
        """The request that message `reply` answers. `text` is text(), which is made once for all of them."""
        start, end = self._starts[reply], self._ends[reply]
        return Request(session, text, start, end - start, end, at, boundaries=self._boundaries(reply))

    def asked(self) -> tuple[bytes, int, Boundaries]:
        """Text, length and boundaries of a prompt for all messages, whose answer is none of them."""
        ids = self._ids + self._tokens.header("assistant")
        count = len(self._starts)
        self._starts.append(len(ids))
        boundaries = self._boundaries(count)
        self._starts.pop()
        return ids.tobytes(), len(ids), boundaries

    def _boundaries(self, reply: int) -> Boundaries:
        before = bisect_left(self._users, reply)
        if not before:
            return Boundaries(query_end=self._starts[reply] - 1)
        first, last = self._users[0], self._users[before - 1]
        return Boundaries(self._starts[first] - 1, self._starts[last] - 1, self._starts[reply] - 1)


def text_of(message: Message) -> str:
    """All that a template writes of a message: its text, its parts' text, its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    calls = message.get("tool_calls")
    return content + json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else content

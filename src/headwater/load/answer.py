"""A streamed answer of an OpenAI-compatible server: what it said, what it cost, and when its parts came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.load import received
from headwater.load.sse import EventParser

Json = dict[str, Any]
REFUSALS = ("queue_full", "rate_limit_exceeded")  # codes of errors that say "too much to do"
REASONING = ("reasoning_content", "reasoning")  # two names that servers have for it


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown now."""

    kind: str  # "text" | "reasoning" | "tool"
    text: str


class Answer:
    """Fed with a response's bytes, of either endpoint. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self.first: float | None = None  # when the first text, reasoning or tool call came
        self.last: float | None = None
        self.gaps: list[float] = []  # seconds between the events that carried something
        self.usage: Json = {}
        self.account: Json = {}  # Headwater's own: where it resumed, and why not deeper
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._error_code: str | None = None
        self._said: dict[str, list[str]] = {"text": [], "reasoning": [], "tool": []}
        self._events = EventParser()

    def feed(self, chunk: bytes, now: float) -> list[Piece]:
        """The pieces that are new."""
        pieces: list[Piece] = []
        for data in self._events.feed(chunk):
            if data != b"[DONE]":
                pieces += self._take(data, now)
        return pieces

    @property
    def text(self) -> str:
        return "".join(self._said["text"])

    @property
    def reasoning(self) -> str:
        return "".join(self._said["reasoning"])

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """None where the server does not tell."""
        return received.object_of(self.usage.get("prompt_tokens_details")).get("cached_tokens")

    @property
    def output_tokens(self) -> int | None:
        return self.usage.get("completion_tokens")

    @property
    def fault(self) -> str | None:
        """What kept the answer from being whole, once its stream has ended."""
        if self.error is None and self.finish_reason is None:
            return "the stream ended before the answer did"
        return self.error

    @property
    def refused(self) -> bool:
        """A place in the queue was given and taken back, after the status line was out."""
        return self.first is None and self._error_code in REFUSALS

    def _take(self, data: bytes, now: float) -> list[Piece]:
        try:
            event = json.loads(data)
        except ValueError as error:
            self.error = f"an event is no JSON: {error}"
            return []
        if not isinstance(event, dict):
            self.error = f"an event is {str(event)[:80]!r}, must be an object"
            return []
        if event.get("error"):
            self.error = error_message(event)
            self._error_code = event["error"].get("code") if isinstance(event["error"], dict) else None
        self.usage = received.object_of(event.get("usage")) or self.usage
        self.account = received.object_of(event.get("headwater")) or self.account
        pieces = [
            piece
            for choice in received.list_of(event.get("choices"))
            for piece in self._choice(received.object_of(choice))
        ]
        if pieces:
            self._came(now)
        for piece in pieces:
            self._said[piece.kind].append(piece.text)
        return pieces

    def _choice(self, choice: Json) -> Iterator[Piece]:
        self.finish_reason = received.text_of(choice.get("finish_reason")) or self.finish_reason
        delta = received.object_of(choice.get("delta"))
        for name in REASONING:
            if text := received.text_of(delta.get(name)):
                yield Piece("reasoning", text)
        if text := received.text_of(choice.get("text")) or received.text_of(delta.get("content")):
            yield Piece("text", text)
        for call in received.list_of(delta.get("tool_calls")):
            function = received.object_of(received.object_of(call).get("function"))
            yield Piece("tool", received.text_of(function.get("name")) + received.text_of(function.get("arguments")))

    def _came(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now


def error_message(body: object) -> str:
    """Of an error in OpenAI's form, or whatever else a server says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)

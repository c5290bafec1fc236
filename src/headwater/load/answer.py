"""A streamed answer of an OpenAI-compatible server: its text, its cost, and the times at which its parts arrived."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
REFUSALS = ("queue_full", "rate_limit_exceeded")  # codes of errors that mean overload
PROGRESS = re.compile(rb"progress (\d+/\d+)")  # comment of a server that was asked for include_progress
REASONING = ("reasoning_content", "reasoning")  # both names are in use


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that can be shown."""

    kind: str  # "text" | "reasoning" | "tool" | "progress": computed tokens of the prompt, a slash, all of them
    text: str


class Answer:
    """An answer that is read from a response's bytes, of either endpoint. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.first: float | None = None  # time of the first text, reasoning or tool call
        self.last: float | None = None
        self.gaps: list[float] = []  # seconds between the events that carried any of these
        self.usage: Json = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._account: Json = {}  # Headwater's
        self._error_code: str | None = None
        self._parts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool": []}
        self._events = EventParser()

    def feed(self, chunk: bytes, now: float) -> list[Piece]:
        """Read the next bytes; returns the pieces that they complete."""
        pieces: list[Piece] = []
        for data in self._events.feed(chunk):
            if data != b"[DONE]":
                pieces += self._take(data, now)
        progress = PROGRESS.fullmatch(self._events.take_comment())
        return [Piece("progress", progress[1].decode())] if progress and not pieces else pieces

    @property
    def text(self) -> str:
        return "".join(self._parts["text"])

    @property
    def reasoning(self) -> str:
        return "".join(self._parts["reasoning"])

    @property
    def prompt_tokens(self) -> int | None:
        return count_of(self.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of the prompt; None if the server does not report them."""
        return count_of(object_of(self.usage.get("prompt_tokens_details")).get("cached_tokens"))

    @property
    def output_tokens(self) -> int | None:
        return count_of(self.usage.get("completion_tokens"))

    @property
    def reason(self) -> str | None:
        """Headwater's reason of the position at which it resumed."""
        return text_of(self._account.get("reason")) or None

    @property
    def resumed_at(self) -> int | None:
        """Position of the prompt at which Headwater resumed."""
        return count_of(self._account.get("resumed_at"))

    @property
    def fault(self) -> str | None:
        """The reason why the answer is incomplete, after the end of its stream; None if it is complete."""
        if self.error is None and self.finish_reason is None:
            return "the stream ended before the answer did"
        return self.error

    @property
    def refused(self) -> bool:
        """True if the server refused the request after it had sent the status line."""
        return self.first is None and self._error_code in REFUSALS

    def _take(self, data: bytes, now: float) -> list[Piece]:
        try:
            event = json.loads(data)
        except ValueError as error:
            self.error = f"an event is not JSON: {error}"
            return []
        if not isinstance(event, dict):
            self.error = f"an event is {str(event)[:80]!r}, must be an object"
            return []
        if event.get("error"):
            self.error = error_message(event)
            self._error_code = event["error"].get("code") if isinstance(event["error"], dict) else None
        self.usage = object_of(event.get("usage")) or self.usage
        self._account = object_of(event.get("headwater")) or self._account
        pieces = [piece for choice in list_of(event.get("choices")) for piece in self._choice(object_of(choice))]
        if pieces:
            self._time(now)
        for piece in pieces:
            self._parts[piece.kind].append(piece.text)
        return pieces

    def _choice(self, choice: Json) -> Iterator[Piece]:
        self.finish_reason = text_of(choice.get("finish_reason")) or self.finish_reason
        delta = object_of(choice.get("delta"))
        for name in REASONING:
            if text := text_of(delta.get(name)):
                yield Piece("reasoning", text)
        if text := text_of(choice.get("text")) or text_of(delta.get("content")):
            yield Piece("text", text)
        for call in list_of(delta.get("tool_calls")):
            function = object_of(object_of(call).get("function"))
            yield Piece("tool", text_of(function.get("name")) + text_of(function.get("arguments")))

    def _time(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now


def error_message(body: object) -> str:
    """Return the message of an error in OpenAI's form, or the body if it has another form."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)


class EventParser:
    """A parser of server-sent events from bytes that are cut anywhere (WHATWG HTML, section 9.2).

    It keeps the data of events, and the last comment; other fields are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that is not complete
        self._data: list[bytes] = []  # lines of an event that is not complete
        self._comment = b""
        self._after_return = False  # the last line ended with CR: an LF that follows belongs to it

    def feed(self, chunk: bytes) -> list[bytes]:
        """Parse the next bytes; returns the data of each event that they complete."""
        if self._after_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if b"\r" in chunk:
            self._after_return = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b":"):
                self._comment = line[1:].strip()
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def take_comment(self) -> bytes:
        """Return the last comment since the last call, without its colon; empty: there is none."""
        comment, self._comment = self._comment, b""
        return comment


def object_of(value: object) -> Json:
    """Return a value of a server's JSON if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def count_of(value: object) -> int | None:
    """Return a value of a server's JSON if it is a whole number of 0 or more, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

"""Checks of a server's answers: parse an answer and raise Wrong for an invalid one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headwater.load.answer import EventParser

Body = dict[str, Any]

ERROR_FIELDS = {"message", "type", "param", "code"}
REFUSALS = {400: "refused", 413: "refused", 415: "refused", 503: "turned away", 504: "expired"}
ERROR_CODES = {"queue_full": "turned away", "out_of_memory": "turned away", "deadline_exceeded": "expired"}


class Wrong(AssertionError):
    """The server did what it must not do."""


@dataclass
class Choice:
    """One answer of a request, whole or put together of its chunks."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


Choices = dict[int, Choice]


def judge_refusal(status: int, body: Any, retry_after: str | None) -> str:
    """The outcome of an answer that is not 200; raises Wrong unless it is in OpenAI's form."""
    if status not in REFUSALS:
        raise Wrong(f"status {status}: {str(body)[:500]}")
    if set(body) != {"error"} or set(body["error"]) != ERROR_FIELDS or not body["error"]["message"]:
        raise Wrong(f"status {status} is not in OpenAI's form: {str(body)[:500]}")
    if status == 503 and not (retry_after or "").isdecimal():
        raise Wrong(f"status 503 with Retry-After {retry_after!r}")
    return REFUSALS[status]


def choices_of(body: Body) -> Choices:
    """Return the choices of a whole answer; raise Wrong if it has none, or one without a finish reason."""
    choices: Choices = {}
    for choice in body["choices"]:
        said = choice["text"] if "text" in choice else _said(choice["message"])
        choices[choice["index"]] = Choice(said, [choice["logprobs"]], choice["finish_reason"])
    _check_ends(choices)
    return choices


def _said(message: Body) -> str:
    """All that a message or delta says: its reasoning and tool calls, too."""
    said = [message.get("reasoning_content") or "", message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        said.append(f"{function.get('name') or ''}{function.get('arguments') or ''}")
    return "".join(said)


def _check_ends(choices: Choices) -> None:
    for index, choice in choices.items():
        if choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise Wrong(f"choice {index} ends with {choice.finish_reason!r}")
    if sorted(choices) != list(range(len(choices))) or not choices:
        raise Wrong(f"choices are numbered {sorted(choices)}")


class StreamReader:
    """Reads a stream of server-sent events, in whatever pieces it comes."""

    def __init__(self) -> None:
        self.choices: Choices = {}
        self.events = 0
        self.error: str | None = None  # its outcome
        self._done = False
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> None:
        for data in self._parser.feed(chunk):
            if self._done:
                raise Wrong(f"an event after [DONE]: {data[:200]!r}")
            self._take(data)

    def outcome(self) -> str:
        """Once the connection has ended; raises Wrong if the stream has not."""
        if not self._done:
            raise Wrong(f"the stream ended after {self.events} events without [DONE]")
        if self.error is not None:
            return self.error
        _check_ends(self.choices)
        return "answered"

    def _take(self, data: bytes) -> None:
        self.events += 1
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._fail(event["error"])
            return
        for delta in event["choices"]:
            choice = self.choices.setdefault(delta["index"], Choice())
            choice.text += delta["text"] if "text" in delta else _said(delta["delta"])
            if delta.get("logprobs"):
                choice.logprobs.append(delta["logprobs"])
            choice.finish_reason = delta["finish_reason"] or choice.finish_reason

    def _fail(self, error: Body) -> None:
        if set(error) != ERROR_FIELDS or error["code"] not in ERROR_CODES:
            raise Wrong(f"a stream ends with {error}")
        self.error = ERROR_CODES[error["code"]]

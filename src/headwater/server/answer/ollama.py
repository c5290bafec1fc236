"""Reply of Ollama's API: an object with the answer and its times, or a stream of such objects, a line each."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headwater.events import FinishedEvent, TokenEvent
from headwater.server.answer.formats.parser import CallArguments, CallBegin, Content, Delta, Reasoning
from headwater.server.answer.forms import Json, Parser, TokenNames, chat_logprobs, deltas_of, new_call_id
from headwater.server.answer.reply import one_line
from headwater.server.http.error_forms import ollama_form
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import Events, Prefilled
from headwater.server.http.middleware import current_context, current_request_id
from headwater.server.requests.normal_form import mapping
from headwater.server.requests.ollama import OllamaRequest

MEDIA_TYPE = "application/x-ndjson"


@dataclass(slots=True)
class Piece:
    """Next piece of an answer: its text, reasoning and complete calls."""

    content: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.content or self.thinking or self.calls)

    @classmethod
    def joined(cls, pieces: list[Piece]) -> Piece:
        """Return the pieces, in their order, as one."""
        content = "".join(piece.content for piece in pieces)
        thinking = "".join(piece.thinking for piece in pieces)
        return cls(content, thinking, [call for piece in pieces for call in piece.calls])


def chat_fields(piece: Piece) -> Json:
    """Return the fields of a piece in an answer of /api/chat."""
    message: Json = {"role": "assistant", "content": piece.content}
    message |= {"thinking": piece.thinking} if piece.thinking else {}
    return {"message": message | ({"tool_calls": piece.calls} if piece.calls else {})}


def generate_fields(piece: Piece) -> Json:
    """Return the fields of a piece in an answer of /api/generate, which has no tools."""
    return {"response": piece.content, **({"thinking": piece.thinking} if piece.thinking else {})}


Fields = Callable[[Piece], Json]


class OllamaReply:
    """Answer to one request, from the events of its only generation."""

    media_type = MEDIA_TYPE

    def __init__(
        self, body: OllamaRequest, model: str, parser: Parser, names: TokenNames | None, fields: Fields
    ) -> None:
        """`names` is None if no log probabilities are wanted; `fields` are those of the endpoint's answers."""
        self._pieces = Pieces(parser, shows_reasoning=body.think is not False)
        self._model, self._names, self._fields = model, names, fields
        self._times = Times()
        self._warnings = {"warnings": body.warnings} if body.warnings else {}

    async def whole(self, events: Events) -> Json:
        """Return the answer when the generation has ended; raises its error if it failed."""
        pieces, tokens = [], []
        async for _, event in events:
            self._times.take(event)
            pieces.append(self._pieces.take(event))
            tokens += [event] if isinstance(event, TokenEvent) else []
        assert isinstance(event, FinishedEvent)
        return self._object(Piece.joined(pieces), tokens) | self._end(event)

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Yield objects, a line each; a failure midway ends them with an error. Usage is always included."""
        try:
            async for _, event in events:
                self._times.take(event)
                piece = self._pieces.take(event)
                tokens = [event] if self._names and isinstance(event, TokenEvent) else []
                if tokens or not piece.empty:
                    yield line(self._object(piece, tokens) | {"done": False})
            assert isinstance(event, FinishedEvent)
            yield line(self._object(Piece(), []) | self._end(event))
        except Exception as error:  # the status was sent already, so the error can only be sent as a line
            status, body = error_body(error)
            yield line(ollama_form(status, body["error"], current_request_id()))

    def keep_alive(self, progress: Prefilled) -> str:
        """Return a text for a waiting client: a piece without text, since NDJSON has no comments."""
        return line(self._object(Piece(), []) | {"done": False})

    def _object(self, piece: Piece, tokens: list[TokenEvent]) -> Json:
        shown = head(self._model) | self._fields(piece)
        if self._names is None or not tokens:
            return shown
        return shown | {"logprobs": chat_logprobs(self._names, tokens)["content"]}

    def _end(self, end: FinishedEvent) -> Json:
        """Return the fields of an answer's end."""
        counts = {"prompt_eval_count": end.account.prompt_tokens, "eval_count": end.output_tokens}
        ended = {"done": True, "done_reason": end.finish_reason, **self._times.durations(end), **counts}
        return {**ended, "headwater": end.account.as_dict() | self._warnings}


def loaded(model: str, fields: Fields) -> Json:
    """Return the answer to a request without a prompt, by which clients load a model: it is loaded."""
    return head(model) | fields(Piece()) | {"done": True, "done_reason": "load"}


def head(model: str) -> Json:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def line(value: Json) -> str:
    return f"{one_line(value)}\n"


class Times:
    """Times of one request, from its arrival on, as `time.perf_counter` counts seconds."""

    def __init__(self) -> None:
        self._arrived, self._submitted = current_context().started, time.perf_counter()
        self._first: float | None = None  # time of the first token

    def take(self, event: object) -> None:
        """Note the time if this is the first token."""
        if self._first is None and isinstance(event, TokenEvent):
            self._first = time.perf_counter()

    def durations(self, end: FinishedEvent) -> dict[str, int]:
        """Return nanoseconds until the computation began, until the first token, and from there to the end."""
        now = time.perf_counter()
        began = self._submitted + (end.queued_seconds or 0.0)
        first = max(began, now if self._first is None else self._first)
        parts = {"load": began - self._arrived, "prompt_eval": first - began, "eval": now - first}
        parts["total"] = now - self._arrived
        return {f"{name}_duration": max(0, round(seconds * 1e9)) for name, seconds in parts.items()}


class Pieces:
    """Pieces of one answer. A call is held back until all of its arguments are there, since they are an object."""

    def __init__(self, parser: Parser, shows_reasoning: bool) -> None:
        self._parser, self._shows_reasoning = parser, shows_reasoning
        self._call: Json | None = None  # the open one; its arguments are text
        self._calls = 0

    def take(self, event: object) -> Piece:
        """Return the piece that an event completes; after the last event nothing is held back."""
        piece = self._piece(deltas_of(self._parser, event))
        piece.calls += self._closed() if isinstance(event, FinishedEvent) else []
        return piece

    def _piece(self, deltas: Iterable[Delta]) -> Piece:
        piece = Piece()
        for delta in deltas:
            match delta:
                case Content(text):
                    piece.calls += self._closed() if text else []
                    piece.content += text
                case Reasoning(text):
                    piece.thinking += text if self._shows_reasoning else ""
                case CallBegin(name, id_):
                    piece.calls += self._closed()
                    self._call = {"name": name, "id": id_ or new_call_id(), "arguments": ""}
                case CallArguments(text):
                    assert self._call is not None
                    self._call["arguments"] += text
        return piece

    def _closed(self) -> list[Json]:
        """Return the open call, if any, and close it."""
        call, self._call = self._call, None
        if call is None:
            return []
        function: dict[str, Any] = {"index": self._calls, "name": call["name"]}
        self._calls += 1
        return [{"id": call["id"], "function": {**function, "arguments": mapping(call["arguments"])}}]

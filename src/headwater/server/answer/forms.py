"""How each of OpenAI's two endpoints words its answers: whole ones, and pieces of streamed ones."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Protocol

from headwater.events import TokenEvent
from headwater.server.answer.formats.delta import CallArguments, CallBegin, Content, Delta, Reasoning, joined
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.logprobs import TokenNames, chat_logprobs, completion_logprobs

Json = dict[str, Any]


class Voice(Protocol):
    """Says one streamed answer: its text in pieces, and how it ended."""

    def piece(self, text: str) -> Json | None:
        """What can be said now; None for nothing yet. The first piece is never nothing."""
        ...

    def last(self, text: str, reason: str) -> Json:
        """The rest, with its finish_reason."""
        ...


class Form(Protocol):
    id_prefix: str
    object: str
    chunk_object: str
    nothing: Json  # a piece that says nothing

    def choice(self, text: str, reason: str) -> Json: ...

    def voice(self) -> Voice: ...

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json: ...


class CompletionForm:
    """Text as it is."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    nothing: Json = {"text": ""}  # noqa: RUF012

    def choice(self, text: str, reason: str) -> Json:
        return {"text": text, "finish_reason": reason}

    def voice(self) -> Voice:
        return CompletionVoice()

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
        return completion_logprobs(names, tokens, offset)


class CompletionVoice:
    def __init__(self) -> None:
        self._begun = False

    def piece(self, text: str) -> Json | None:
        said = {"text": text} if text or not self._begun else None
        self._begun = True
        return said

    def last(self, text: str, reason: str) -> Json:
        return {"text": text, "finish_reason": reason}


class ChatForm:
    """Messages: content, reasoning and tool calls, as the model's formats tell them apart."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: Json = {"delta": {"content": ""}}  # noqa: RUF012

    def __init__(self, parser: Callable[[], AnswerParser]) -> None:
        """`parser` makes one for each answer."""
        self._parser = parser

    def choice(self, text: str, reason: str) -> Json:
        parser = self._parser()
        deltas = joined(parser.push(text) + parser.finish())
        message = said(deltas, ToolCalls())
        calls = [
            {key: value for key, value in call.items() if key != "index"} for call in message.get("tool_calls", ())
        ]
        content = message.pop("content", None if calls else "")
        whole = {"role": "assistant", "content": content, **message, **({"tool_calls": calls} if calls else {})}
        return {"message": whole, "finish_reason": finish_reason(reason, bool(calls))}

    def voice(self) -> Voice:
        return ChatVoice(self._parser())

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
        return chat_logprobs(names, tokens)


class ChatVoice:
    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._calls = ToolCalls()
        self._begun = False

    def piece(self, text: str) -> Json | None:
        message = self._said(self._parser.push(text))
        return {"delta": message} if message else None

    def last(self, text: str, reason: str) -> Json:
        message = self._said(self._parser.push(text) + self._parser.finish())
        return {"delta": message or {"content": ""}, "finish_reason": finish_reason(reason, self._calls.count > 0)}

    def _said(self, deltas: list[Delta]) -> Json:
        message = said(joined(deltas), self._calls)
        if not self._begun:
            self._begun = True
            message = {"role": "assistant", "content": None if "tool_calls" in message else "", **message}
        return message


class ToolCalls:
    """Numbers an answer's calls and names them."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, name: str, id_: str | None) -> Json:
        """`id_`: what the model calls it; its template will write that again."""
        self.count += 1
        function = {"name": name, "arguments": ""}
        return {
            "index": self.count - 1,
            "id": id_ or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": function,
        }

    def go_on(self) -> Json:
        return {"index": self.count - 1, "function": {"arguments": ""}}


def said(deltas: list[Delta], calls: ToolCalls) -> Json:
    """A message's fields, or what is new in them; those that have nothing are left out.

    Reasoning has two names: DeepSeek's `reasoning_content`, which most clients read, and `reasoning`, which
    OpenRouter and newer vLLM have in its place. Both are given, with equal text; no client that reads one
    adds the other to it.
    """
    message: Json = {}
    for delta in deltas:
        match delta:
            case Content(text):
                message["content"] = message.get("content", "") + text
            case Reasoning(text):
                message["reasoning_content"] = message["reasoning"] = message.get("reasoning", "") + text
            case CallBegin(name, id_):
                message.setdefault("tool_calls", []).append(calls.begin(name, id_))
            case CallArguments(text):
                entries = message.setdefault("tool_calls", [])
                if not entries:
                    entries.append(calls.go_on())
                entries[-1]["function"]["arguments"] += text
    return message


def finish_reason(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason

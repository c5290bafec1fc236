"""OpenAI's forms of answers, completions and chat completions: whole choices, streamed pieces and log probabilities."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from headwater.engine.detokenizer import byte_table
from headwater.events import TokenEvent
from headwater.server.answer.formats.delta import CallArguments, CallBegin, Content, Delta, Reasoning, joined
from headwater.server.answer.formats.parser import AnswerParser

LEAST = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity

Json = dict[str, Any]


class CompletionForm:
    """Form of completions: text without changes."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    nothing: Json = {"text": ""}  # noqa: RUF012  an empty piece

    def choice(self, text: str, reason: str) -> Json:
        return {"text": text, "finish_reason": reason}

    def voice(self) -> Voice:
        return CompletionVoice()

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
        return completion_logprobs(names, tokens, offset)


class CompletionVoice:
    """Writer of a streamed completion."""

    def __init__(self) -> None:
        self._begun = False

    def piece(self, text: str) -> Json | None:
        """Return the fields of a piece, or None if nothing can be shown yet; the first piece is never None."""
        fields = {"text": text} if text or not self._begun else None
        self._begun = True
        return fields

    def last(self, text: str, reason: str) -> Json:
        """Return the fields of the last piece, with its finish_reason."""
        return {"text": text, "finish_reason": reason}


class ChatForm:
    """Form of chat completions: messages with content, reasoning and tool calls, split by the model's formats."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: Json = {"delta": {"content": ""}}  # noqa: RUF012

    def __init__(self, parser: Callable[[], AnswerParser]) -> None:
        """`parser` returns a new parser for each answer."""
        self._parser = parser

    def choice(self, text: str, reason: str) -> Json:
        parser = self._parser()
        deltas = joined(parser.push(text) + parser.finish())
        message = message_fields(deltas, ToolCalls())
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
    """Writer of a streamed message."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._calls = ToolCalls()
        self._begun = False

    def piece(self, text: str) -> Json | None:
        message = self._fields(self._parser.push(text))
        return {"delta": message} if message else None

    def last(self, text: str, reason: str) -> Json:
        message = self._fields(self._parser.push(text) + self._parser.finish())
        return {"delta": message or {"content": ""}, "finish_reason": finish_reason(reason, self._calls.count > 0)}

    def _fields(self, deltas: list[Delta]) -> Json:
        message = message_fields(joined(deltas), self._calls)
        if not self._begun:
            self._begun = True
            message = {"role": "assistant", "content": None if "tool_calls" in message else "", **message}
        return message


def new_call_id() -> str:
    """Return an id for a call to which the model gave none."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCalls:
    """Numbers and ids of an answer's calls."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, name: str, id_: str | None) -> Json:
        """Return the first piece of a call. `id_` is the model's own id, which its template will write again."""
        self.count += 1
        function = {"name": name, "arguments": ""}
        return {
            "index": self.count - 1,
            "id": id_ or new_call_id(),
            "type": "function",
            "function": function,
        }

    def go_on(self) -> Json:
        """Return a further piece of the open call."""
        return {"index": self.count - 1, "function": {"arguments": ""}}


Form = CompletionForm | ChatForm
Voice = CompletionVoice | ChatVoice


def message_fields(deltas: list[Delta], calls: ToolCalls) -> Json:
    """Return the fields of a message, or of a piece of one, without empty fields.

    Reasoning has two names: DeepSeek's `reasoning_content`, which most clients read, and `reasoning`, which OpenRouter
    and newer vLLM use. Both are sent with the same text; no client that reads one adds the other to it.
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
    """Return "tool_calls" for an answer that stopped after calls, else the engine's reason."""
    return "tool_calls" if called and reason == "stop" else reason


class TokenNames:
    """Names of single tokens, many of which are not whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer)

    def raw(self, token: int) -> bytes:
        """Return the token's bytes."""
        if self._table is not None:
            return self._table.raw(token)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def name(self, token: int) -> str:
        """Return the token's text, or "bytes:\\xf0\\x9f" if it is not UTF-8, so that no two tokens share a name."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, tokens: list[TokenEvent]) -> Json:
    """Return log probabilities as chat completions write them."""

    def entry(token: int, logprob: float | None) -> Json:
        return {"token": names.name(token), "logprob": finite(logprob), "bytes": list(names.raw(token))}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(top.token, top.logprob) for top in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
    """Return log probabilities as completions write them; `offset`: characters of the answer before these tokens.

    The first token of a prompt has no log probability: null in both lists, as OpenAI writes it.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [names.name(t.token) for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [
            None if t.logprob is None else {names.name(top.token): finite(top.logprob) for top in t.top} for t in tokens
        ],
        "text_offset": offsets,
    }


def finite(logprob: float | None) -> float | None:
    """Replace minus infinity."""
    return None if logprob is None else max(logprob, LEAST)

"""OpenAI's forms of answers, completions and chat completions: whole choices, streamed pieces and log probabilities."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, Protocol

from tokenizers import Tokenizer

from headwater.engine.detokenizer import byte_table
from headwater.events import FinishedEvent, PromptEvent, TokenEvent
from headwater.server.answer.formats.parser import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Reasoning,
    joined,
)
from headwater.server.prompt.written import Call, WrittenCalls

MIN_LOGPROB = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity

Json = dict[str, Any]


class Parser(Protocol):
    """Parser of one answer."""

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        ...

    def finish(self) -> list[Delta]:
        """Release the text that was held back; nothing may be pushed afterwards."""
        ...


def deltas_of(parser: Parser, event: object) -> list[Delta]:
    """Return the deltas of an event's text; those of the last event include the text that was held back."""
    if isinstance(event, FinishedEvent):
        return parser.push(event.text) + parser.finish()
    return parser.push(event.text) if isinstance(event, TokenEvent) else []


class CompletionForm:
    """Writer of one completion: text without changes."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    one_prompt = False  # log probabilities of prompts are written in each choice
    nothing: Json = {"text": ""}  # noqa: RUF012  an empty piece

    def __init__(self) -> None:
        self._begun = False
        self._characters = 0  # of the tokens whose log probabilities were written

    def piece(self, text: str) -> Json | None:
        """Return the fields of a piece, or None if nothing can be shown yet; the first piece is never None."""
        fields = {"text": text} if text or not self._begun else None
        self._begun = True
        return fields

    def last(self, text: str, reason: str) -> Json:
        """Return the fields of the last piece, with its finish_reason."""
        return {"text": text, "finish_reason": reason}

    whole = last

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent]) -> Json:
        """Return the log probabilities of the next tokens."""
        offset = self._characters
        self._characters += sum(len(token.text) for token in tokens)
        return completion_logprobs(names, tokens, offset)


class ChatForm:
    """Writer of one message: content, reasoning and tool calls, split by the model's formats."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    one_prompt = True
    chunk_object = "chat.completion.chunk"
    nothing: Json = {"delta": {"content": ""}}  # noqa: RUF012

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._calls = 0
        self._begun = False

    def piece(self, text: str) -> Json | None:
        message = self._fields(self._parser.push(text))
        return {"delta": message} if message else None

    def last(self, text: str, reason: str) -> Json:
        message = self._fields(self._parser.push(text) + self._parser.finish())
        stopped = "tool_calls" if self._calls and reason == "stop" else reason
        return {"delta": message or {"content": ""}, "finish_reason": stopped}

    def whole(self, text: str, reason: str) -> Json:
        """Return the fields of the answer, which is `text`."""
        choice = self.last(text, reason)
        for call in choice["delta"].get("tool_calls", ()):
            del call["index"]
        return {"message": choice.pop("delta"), **choice}

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent]) -> Json:
        return chat_logprobs(names, tokens)

    def _fields(self, deltas: list[Delta]) -> Json:
        """Return the fields of the message's next piece, without empty fields except in the first.

        Reasoning has two names: DeepSeek's `reasoning_content`, which most clients read, and `reasoning`, which
        OpenRouter and newer vLLM use. Both are sent with the same text; no client that reads one adds the other to it.
        """
        message: Json = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        for delta in joined(deltas):
            match delta:
                case Content(text):
                    message["content"] = message.get("content", "") + text
                case Reasoning(text):
                    message["reasoning_content"] = message["reasoning"] = message.get("reasoning", "") + text
                case CallBegin():
                    message.setdefault("tool_calls", []).append(self._call(delta))
                case CallArguments(text):
                    go_on = {"index": self._calls - 1, "function": {"arguments": ""}}
                    message.setdefault("tool_calls", [go_on])[-1]["function"]["arguments"] += text
        if "tool_calls" in message and message.get("content") == "":
            message["content"] = None
        return message

    def _call(self, begin: CallBegin) -> Json:
        """Return the first piece of a call. If the model gave it an id, its template will write that again."""
        self._calls += 1
        function = {"name": begin.name, "arguments": ""}
        return {"index": self._calls - 1, "id": begin.id or new_call_id(), "type": "function", "function": function}


Form = CompletionForm | ChatForm


def new_call_id(prefix: str = "call_") -> str:
    """Return an id for a call to which the model gave none."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


class TokenNames:
    """Names of single tokens, many of which are not whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer)

    def raw(self, token: int) -> bytes:
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


def prompt_logprobs(names: TokenNames, k: int, event: PromptEvent) -> list[Json | None]:
    """Return log probabilities of a prompt as vLLM writes them: by token id, of the token and of the `k` most likely.

    The first token has none: null.
    """

    def entry(token: int, logprob: float | None, rank: int | None) -> Json:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token)}

    rows: list[Json | None] = [None]
    for token in event.tokens[1:]:
        row = {str(token.token): entry(token.token, token.logprob, token.rank)}
        for rank, top in enumerate(token.top[:k], 1):
            row.setdefault(str(top.token), entry(top.token, top.logprob, rank))
        rows.append(row)
    return rows


def finite(logprob: float | None) -> float | None:
    """Replace minus infinity."""
    return None if logprob is None else max(logprob, MIN_LOGPROB)


class RecordingParser:
    """Parser that gives each call an id, and keeps the calls when the answer ends."""

    def __init__(
        self, parser: Parser, written: WrittenCalls, namespace: str, id_prefix: str, close: str, space: bool = False
    ) -> None:
        """`close`: the tag that ends reasoning; `space`: the template writes a space before the content."""
        self._parser, self._written, self._namespace = parser, written, namespace
        self._id_prefix, self._close, self._space = id_prefix, close, space
        self._text = ""
        self._content: list[str] = []  # before the first call
        self._calls: list[Call] = []
        self._reasons = self._goes_on = False  # reasoning has come; content has come after a call

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        self._text += text
        return [self._kept(delta) for delta in self._parser.push(text)]

    def finish(self) -> list[Delta]:
        """Release the text that was held back, and keep the calls; nothing may be pushed afterwards."""
        deltas = [self._kept(delta) for delta in self._parser.finish()]
        if self._calls and not self._goes_on and (written := self._calls_as_written()):
            self._written.add(self._namespace, self._calls, written)
        return deltas

    def _kept(self, delta: Delta) -> Delta:
        match delta:
            case CallBegin(name, id_):
                delta = CallBegin(name, id_ or new_call_id(self._id_prefix))
                self._calls.append(Call(str(delta.id), name, ""))
            case CallArguments(text):
                self._calls[-1] = replace(self._calls[-1], arguments=self._calls[-1].arguments + text)
            case Content(text) if self._calls:
                self._goes_on = self._goes_on or bool(text.strip())
            case Content(text):
                self._content.append(text)
                if text and self._space:
                    self._space, delta = False, Content(text.removeprefix(" "))
            case Reasoning(text):
                self._reasons = self._reasons or bool(text)
        return delta

    def _calls_as_written(self) -> str:
        """Return the text of the calls with the white space before them; empty if they cannot be found in it."""
        answer = self._text
        if self._reasons:
            answer = answer.partition(self._close)[2]
        content, answer = "".join(self._content), answer.lstrip("\n")
        return answer[len(content) :].rstrip() if answer.startswith(content) else ""

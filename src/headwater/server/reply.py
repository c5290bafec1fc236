"""OpenAI's answers, whole or as a stream of server-sent events, in both of its forms."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, Protocol

from headwater.server.errors import error_body
from headwater.server.exchange import Events, Progress
from headwater.server.logprobs import TokenNames, chat_logprobs, completion_logprobs
from headwater.types import FinishedEvent, TokenEvent

Json = dict[str, Any]


class Form(Protocol):
    """How one of the two endpoints words its answers."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, text: str) -> Json: ...

    def delta(self, text: str, first: bool) -> Json: ...

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json: ...


class CompletionForm:
    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def choice(self, text: str) -> Json:
        return {"text": text}

    def delta(self, text: str, first: bool) -> Json:
        return {"text": text}

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
        return completion_logprobs(names, tokens, offset)


class ChatForm:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str, first: bool) -> Json:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def logprobs(self, names: TokenNames, tokens: list[TokenEvent], offset: int) -> Json:
        return chat_logprobs(names, tokens)


class Reply:
    """The answer to one request. `names` is None where no log probabilities were asked for."""

    def __init__(self, form: Form, model: str, names: TokenNames | None, answers: int = 1) -> None:
        """`answers`: how many of each prompt; the generations of one prompt have numbers side by side."""
        self._form = form
        self._names = names
        self._answers = answers
        self._head = {"id": form.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    async def whole(self, events: Events) -> Json:
        """The answer once all generations ended; raises the error of one that failed."""
        tokens: dict[int, list[TokenEvent]] = defaultdict(list)
        finished: dict[int, FinishedEvent] = {}
        async for number, event in events:
            if isinstance(event, TokenEvent):
                tokens[number].append(event)
            else:
                finished[number] = event
        ends = sorted(finished.items())
        choices = [self._choice(number, tokens[number], end) for number, end in ends]
        outcome = {
            "usage": usage([end for _, end in ends], self._answers),
            "headwater": account([end for _, end in ends]),
        }
        return {**self._head, "object": self._form.object, "choices": choices, **outcome}

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events; one that fails midway ends with its error."""
        try:
            async for chunk in self.chunks(events, include_usage):
                yield sse(chunk)
        except Exception as error:  # the status line is gone: this is the only place left to say it
            yield sse(error_body(error)[1])
        yield "data: [DONE]\n\n"

    async def chunks(self, events: Events, include_usage: bool) -> AsyncIterator[Json]:
        """What a stream consists of; raises the error of a generation that failed."""
        shown: dict[int, int] = {}  # characters of each choice that are out
        finished: dict[int, FinishedEvent] = {}
        async for number, event in events:
            if isinstance(event, FinishedEvent):
                finished[number] = event
            elif number in shown and not event.text and self._names is None:
                continue
            yield self._chunk(number, event, shown.get(number), include_usage)
            shown[number] = shown.get(number, 0) + len(event.text)
        if include_usage:
            ends = [end for _, end in sorted(finished.items())]
            outcome = {"choices": [], "usage": usage(ends, self._answers), "headwater": account(ends)}
            yield {**self._head, "object": self._form.chunk_object, **outcome}

    def _choice(self, number: int, tokens: list[TokenEvent], end: FinishedEvent) -> Json:
        text = "".join(token.text for token in tokens) + end.text
        return {
            "index": number,
            **self._form.choice(text),
            "logprobs": self._form.logprobs(self._names, tokens, 0) if self._names else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop,
        }

    def _chunk(self, number: int, event: Progress, shown: int | None, include_usage: bool) -> Json:
        """One event as a chunk. `shown`: characters of this choice that are out, None if this is its first chunk."""
        choice = {"index": number, **self._form.delta(event.text, shown is None), "logprobs": None}
        chunk = {**self._head, "object": self._form.chunk_object, "choices": [choice]}
        if include_usage:
            chunk["usage"] = None
        if isinstance(event, TokenEvent):
            choice["finish_reason"] = None
            if self._names:
                choice["logprobs"] = self._form.logprobs(self._names, [event], shown or 0)
        else:
            choice |= {"finish_reason": event.finish_reason, "stop_reason": event.stop}
            chunk["headwater"] = event.account.as_dict()
        return chunk


def sse(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(ends: list[FinishedEvent], answers: int) -> Json:
    """Tokens of all generations of a request together. A prompt counts once, however many answers it has."""
    prompts = [end.account for end in ends[::answers]]
    prompt = sum(account.prompt_tokens for account in prompts)
    output = sum(end.output_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(account.cached_tokens for account in prompts)},
    }


def account(finished: list[FinishedEvent]) -> Json | list[Json]:
    """What the cache did: one account, or a list of them for a request of several prompts."""
    accounts = [end.account.as_dict() for end in finished]
    return accounts[0] if len(accounts) == 1 else accounts

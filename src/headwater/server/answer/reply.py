"""OpenAI's answers, whole or as a stream of server-sent events, in both of its forms."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headwater.events import FinishedEvent, TokenEvent
from headwater.server.answer.forms import Form, Json, Voice
from headwater.server.answer.logprobs import TokenNames
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import Events

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # JSON itself escapes all others


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
        streams: dict[int, Stream] = defaultdict(lambda: Stream(self._form.voice()))
        finished: dict[int, FinishedEvent] = {}
        async for number, event in events:
            if isinstance(event, FinishedEvent):
                finished[number] = event
                chunk = self._last_chunk(streams[number], event)
            else:
                chunk = self._chunk(streams[number], event)
            if chunk is not None:
                chunk["choices"][0]["index"] = number
                yield {**chunk, "usage": None} if include_usage else chunk
        if include_usage:
            ends = [end for _, end in sorted(finished.items())]
            outcome = {"choices": [], "usage": usage(ends, self._answers), "headwater": account(ends)}
            yield {**self._head, "object": self._form.chunk_object, **outcome}

    def _choice(self, number: int, tokens: list[TokenEvent], end: FinishedEvent) -> Json:
        text = "".join(token.text for token in tokens) + end.text
        return {
            "index": number,
            **self._form.choice(text, end.finish_reason),
            "logprobs": self._form.logprobs(self._names, tokens, 0) if self._names else None,
            "stop_reason": end.stop,
        }

    def _chunk(self, stream: Stream, event: TokenEvent) -> Json | None:
        """One token as a chunk; None if it shows nothing, and has no log probability to show."""
        piece = stream.voice.piece(event.text)
        if piece is None and self._names is None:
            return None
        logprobs = self._form.logprobs(self._names, [event], stream.shown) if self._names else None
        stream.shown += len(event.text)
        return self._wrapped({**(piece or self._form.nothing), "logprobs": logprobs, "finish_reason": None})

    def _last_chunk(self, stream: Stream, end: FinishedEvent) -> Json | None:
        last = stream.voice.last(end.text, end.finish_reason)
        return {
            **self._wrapped({**last, "logprobs": None, "stop_reason": end.stop}),
            "headwater": end.account.as_dict(),
        }

    def _wrapped(self, choice: Json) -> Json:
        return {**self._head, "object": self._form.chunk_object, "choices": [choice]}


@dataclass(slots=True)
class Stream:
    """Where one streamed choice stands."""

    voice: Voice
    shown: int = 0  # characters that the engine gave


def sse(value: Json) -> str:
    return f"data: {one_line(value)}\n\n"


def one_line(value: Json) -> str:
    """JSON in which nothing ends a line, not even for clients that split streams at all of Unicode's line ends."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)


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

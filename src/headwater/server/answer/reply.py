"""Replies in OpenAI's two older forms, whole or as server-sent events, with prompts echoed if wanted."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from tokenizers import Tokenizer

from headwater.engine.detokenizer import decoder_for
from headwater.events import FinishedEvent, PromptEvent, TokenEvent
from headwater.server.answer.forms import Form, Json, TokenNames
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import EVENTS_TYPE, Events, Prefilled, Progress
from headwater.server.prompt.encoding import Encoded, encode, whole_characters
from headwater.server.requests.chat import CompletionRequest

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # JSON escapes all other line ends
ECHO_TOKEN = -1  # token of an event that holds a whole prompt's text
Echo = Callable[[Events], Events]
PromptScores = Callable[[PromptEvent], list[Json | None]]


class Reply:
    """Answer to one request, whole or streamed. `names` is None if no log probabilities are wanted."""

    media_type = EVENTS_TYPE

    def __init__(
        self,
        form: Callable[[], Form],
        model: str,
        names: TokenNames | None,
        answers: int = 1,
        scores: PromptScores | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """`answers`: number of answers to each prompt; the generations of one prompt have consecutive numbers.

        `scores` writes the log probabilities of prompts; None if they are not wanted. `warnings` are about the request.
        """
        self._new_form, self._form = form, form()
        self._names = names
        self._answers = answers
        self._scores = scores
        self._warnings = {"warnings": list(warnings)} if warnings else {}
        self._head = {"id": self._form.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    async def whole(self, events: Events) -> Json:
        """Return the answer when all generations have ended; raises the error of one that failed."""
        tokens: dict[int, list[TokenEvent]] = defaultdict(list)
        finished: dict[int, FinishedEvent] = {}
        scored: dict[int, Json] = {}
        async for number, event in events:
            if isinstance(event, TokenEvent):
                tokens[number].append(event)
            elif isinstance(event, FinishedEvent):
                finished[number] = event
            elif self._scores is not None:
                scored[number] = {"prompt_logprobs": self._scores(event)}
        choices = [self._choice(number, tokens[number], end) for number, end in sorted(finished.items())]
        answer = {**self._head, "object": self._form.object, "choices": choices, **self._outcome(finished)}
        if self._form.one_prompt:
            return answer | scored.get(0, {})
        return answer | {"choices": [choice | scored.get(choice["index"], {}) for choice in choices]}

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events; if a generation fails midway, its error is the last but one."""
        try:
            async for chunk in self.chunks(events, include_usage):
                yield sse(chunk)
        except Exception as error:  # the status was sent already, so the error can only be sent as an event
            yield sse(error_body(error)[1])
        yield "data: [DONE]\n\n"

    async def chunks(self, events: Events, include_usage: bool) -> AsyncIterator[Json]:
        """Yield the chunks of a stream; raises the error of a generation that failed."""
        forms: dict[int, Form] = defaultdict(self._new_form)
        finished: dict[int, FinishedEvent] = {}
        async for number, event in events:
            if isinstance(event, PromptEvent):
                continue
            if isinstance(event, FinishedEvent):
                finished[number] = event
            if (chunk := self._chunk(forms[number], event)) is not None:
                chunk["choices"][0]["index"] = number
                yield {**chunk, "usage": None} if include_usage else chunk
        if include_usage:
            yield {**self._head, "object": self._form.chunk_object, "choices": [], **self._outcome(finished)}

    def keep_alive(self, progress: Prefilled) -> str:
        """Return a text for a waiting client."""
        return comment(progress)

    def _outcome(self, finished: dict[int, FinishedEvent]) -> Json:
        ends = [end for _, end in sorted(finished.items())]
        accounts = [end.account.as_dict() | self._warnings for end in ends]
        return {"usage": usage(ends, self._answers), "headwater": accounts[0] if len(accounts) == 1 else accounts}

    def _choice(self, number: int, tokens: list[TokenEvent], end: FinishedEvent) -> Json:
        form, text = self._new_form(), "".join(token.text for token in tokens) + end.text
        logprobs = form.logprobs(self._names, tokens) if self._names else None
        choice = form.whole(text, end.finish_reason)
        return {"index": number, **choice, "logprobs": logprobs, "stop_reason": end.stop}

    def _chunk(self, form: Form, event: Progress) -> Json | None:
        """Return the chunk of an event; None if a token has neither text nor log probability to show."""
        if isinstance(event, FinishedEvent):
            last = {**form.last(event.text, event.finish_reason), "logprobs": None, "stop_reason": event.stop}
            return {**self._wrapped(last), "headwater": event.account.as_dict() | self._warnings}
        assert isinstance(event, TokenEvent)
        piece = form.piece(event.text)
        if piece is None and self._names is None:
            return None
        logprobs = form.logprobs(self._names, [event]) if self._names else None
        return self._wrapped({**(piece or form.nothing), "logprobs": logprobs, "finish_reason": None})

    def _wrapped(self, choice: Json) -> Json:
        return {**self._head, "object": self._form.chunk_object, "choices": [choice]}


def comment(progress: Prefilled) -> str:
    """Return a comment for an event stream: the computed and all tokens of the prompt, if they are given."""
    return ": keep-alive\n\n" if progress is None else f": progress {progress[0]}/{progress[1]}\n\n"


def sse(value: Json) -> str:
    """Return a server-sent event with this value as its data."""
    return f"data: {one_line(value)}\n\n"


def one_line(value: Json) -> str:
    """Encode as JSON without line ends, also for clients that split streams at all of Unicode's line ends."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS)


def usage(ends: list[FinishedEvent], answers: int) -> Json:
    """Sum the tokens of a request's generations. A prompt counts once, however many answers it has."""
    prompts = [end.account for end in ends[::answers]]
    prompt = sum(account.prompt_tokens for account in prompts)
    output = sum(end.output_tokens for end in ends)
    found: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(account.cached_tokens for account in prompts)},
    }
    accepted, rejected = sum(end.accepted_drafts for end in ends), sum(end.rejected_drafts for end in ends)
    if accepted + rejected:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return found


def without_echo(events: Events) -> Events:
    """Return the events of answers that do not begin with their prompts."""
    return events


def echo_of(tokenizer: Tokenizer, body: CompletionRequest, encoded: Sequence[Encoded]) -> Echo:
    """Return a function that adds to each answer's events its prompt; `encoded` are the prompts."""
    n, prompts = body.answers, list(zip(body.prompts, encoded, strict=True))
    if body.echoed_logprobs is not None:
        tokens = [text_of_tokens(tokenizer, prompt, one.ends) for prompt, one in prompts]
        return partial(scored, texts=[text for text in tokens for _ in range(n)], k=body.echoed_logprobs)
    texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in body.prompts]
    return partial(echoed, texts=[text for text in texts for _ in range(n)])


async def echoed(events: Events, texts: Sequence[str]) -> Events:
    """Yield the events, with a text before each answer as if it were its first token's."""
    for number, text in enumerate(texts):
        yield number, TokenEvent(ECHO_TOKEN, text)
    async for number, event in events:
        yield number, event


async def scored(events: Events, texts: Sequence[Sequence[str]], k: int) -> Events:
    """Yield the events, and a prompt's tokens as if they were an answer's first, each with the `k` most likely ones.

    `texts` are those of the tokens, by answer.
    """
    async for number, event in events:
        yield number, event
        if isinstance(event, PromptEvent):
            for token, text in zip(event.tokens, texts[number], strict=True):
                yield number, replace(token, text=text, top=token.top[:k])


def text_of_tokens(tokenizer: Tokenizer, prompt: str | list[int], ends: Sequence[int] | None = None) -> list[str]:
    """Return the text that each token adds to the prompt's; a character of several tokens belongs to the first one.

    In a prompt of token ids it belongs to the last one, with which it is complete. `ends` are the ends of the tokens in
    the text, for a text that was not encoded as a whole.
    """
    if isinstance(prompt, str):
        whole = [end for _, end in encode(tokenizer, prompt, True).offsets] if ends is None else ends
        return _cut(whole_characters(prompt), whole)
    special = frozenset(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    decoder = decoder_for(tokenizer, (), special)
    texts = [decoder.push(token) for token in prompt]
    texts[-1] += decoder.flush()
    return texts


def _cut(text: str, ends: Sequence[int]) -> list[str]:
    """Cut the text at these ends; the last piece extends to the end of the text."""
    pieces, at = [], 0
    for end in (*ends[:-1], len(text)):
        pieces.append(text[at:end])
        at = max(at, end)
    return pieces

"""From checked requests to the engine and back: what every route of the API shares."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from tokenizers import Tokenizer

from headwater.cache.view import CacheView
from headwater.config import ServeConfig
from headwater.engine.stats import EngineStats
from headwater.errors import RequestTooLarge, TemplateError
from headwater.events import Event
from headwater.request import Boundaries, Generation
from headwater.server.answer.dialect import Dialect, Shape
from headwater.server.answer.echo import Echo, echo_of
from headwater.server.answer.forms import ChatForm, CompletionForm, Form
from headwater.server.answer.logprobs import TokenNames
from headwater.server.answer.reply import Reply
from headwater.server.http import errors
from headwater.server.http.exchange import Events, Exchange, Progress
from headwater.server.http.stream import EventStream, unless_gone
from headwater.server.observe.record import RequestRecord, Watcher
from headwater.server.prompt.chat import ChatPrompt, ChatPrompter
from headwater.server.prompt.encoding import Encoded
from headwater.server.prompt.segments import MAX_SEGMENTS, SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.chat import ChatRequest, CompletionRequest
from headwater.spec import ModelSpec

CLIENT_GONE = 499  # nobody reads it; logs do


class ServedEngine(Protocol):
    """What the API needs of an engine."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token and its like, as the template may name them
    max_model_len: int
    model_name: str
    spec: ModelSpec
    generation_defaults: dict[str, Any]

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def health(self) -> dict[str, Any]: ...

    def stats(self) -> EngineStats: ...

    def view(self) -> CacheView: ...


class Answers(Protocol):
    """How events become an answer, whole or as server-sent events."""

    async def whole(self, events: Events) -> dict[str, Any]: ...

    def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]: ...


Wording = Callable[[Reply], Answers]


class Service:
    """From checked requests to the engine and back."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.started = int(time.time())
        self.watchers: tuple[Watcher, ...] = ()  # told what becomes of each request
        self._names = TokenNames(engine.tokenizer)
        engine.tokenizer.no_truncation()
        engine.tokenizer.no_padding()
        self._dialect = Dialect(engine.chat_template or "", config, engine.tokenizer)
        self.encoder = SegmentEncoder(engine.tokenizer, config.segment_separator)
        self._prompter: ChatPrompter | None = None
        if engine.chat_template is not None:
            template = ChatTemplate(engine.chat_template, engine.special_tokens)
            self._prompter = ChatPrompter(engine.tokenizer, template, self.encoder)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        record = RequestRecord("completion", self.watchers)
        self._check_answers(body, len(body.prompts))
        if body.max_tokens == 0 and not body.scores_prompt:
            raise errors.BadRequest("max_tokens is 0, at least 1 is needed but for echo with logprobs", "max_tokens")
        encoded = await run_in_threadpool(lambda: [self._tokens(prompt, body.salt) for prompt in body.prompts])
        prompts = [ChatPrompt(one.ids, Boundaries(), True, segments=one.segments) for one in encoded]
        generations = self._generations(body, prompts)
        if body.scores_prompt:
            generations = [scoring(generation, body.logprobs or 0) for generation in generations]
        echo = await run_in_threadpool(echo_of, self.engine.tokenizer, body, encoded) if body.echo else None
        return await self._answer(body, request, CompletionForm(), generations, record, echo)

    async def chat(
        self, body: ChatRequest, request: Request, endpoint: str = "chat", worded: Wording | None = None
    ) -> Response:
        """`worded` turns chat completions into another API's answers."""
        record = RequestRecord(endpoint, self.watchers)
        use, schema = body.tool_use, body.answer_schema
        self._check_answers(body, 1)

        def prepared() -> tuple[ChatPrompt, Shape]:
            prompt = self.chat_prompt(body)
            return prompt, self._dialect.shape(prompt.end, use, schema)

        prompt, shape = await run_in_threadpool(prepared)
        form = ChatForm(partial(self._dialect.parser, prompt.end, use))
        generations = [replace(g, params=shape.applied(g.params)) for g in self._generations(body, [prompt])]
        return await self._answer(body, request, form, generations, record, worded=worded)

    def chat_prompt(self, body: ChatRequest) -> ChatPrompt:
        """The conversation's prompt; raises TemplateError, or BadRequest for content that is no text.

        It may take a second: not for the event loop.
        """
        if self._prompter is None:
            raise TemplateError("the model has no chat template: use /v1/completions")
        try:
            conversation = body.conversation
        except ValueError as error:
            raise errors.BadRequest(str(error), "messages") from error
        return self._prompter.prepare(conversation, body.salt)

    def _tokens(self, prompt: str | list[int], salt: str) -> Encoded:
        if isinstance(prompt, str):
            return self.encoder.encode_prompt(prompt, namespace=salt)
        self.check_tokens(prompt, "prompt")
        return Encoded(tuple(prompt), (), self.encoder.segments_of(prompt))

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises BadRequest for an id that the model has no token for."""
        vocab_size = self.engine.spec.vocab_size
        if tokens and max(tokens) >= vocab_size:
            raise errors.BadRequest(f"token id is {max(tokens):,}, the model has {vocab_size:,} tokens", param)

    def _check_answers(self, body: CompletionRequest | ChatRequest, prompts: int) -> None:
        """Raises BadRequest for more answers than the server takes, before any work goes into them."""
        total, most = prompts * body.answers, self.config.max_running + self.config.max_waiting
        if total > most:
            asked = f"{prompts:,} prompts with n {body.answers:,} are {total:,} answers"
            raise errors.BadRequest(f"{asked}, the server takes {most:,} at once", "n")

    def _generations(self, body: CompletionRequest | ChatRequest, prompts: list[ChatPrompt]) -> list[Generation]:
        """All answers to the first prompt, then to the second, and so on, as OpenAI numbers them."""
        self.check_tokens(body.stop_token_ids or (), "stop_token_ids")
        self.check_tokens([token for token, _ in body.biases], "logit_bias")
        firsts = [self._generation(body, prompt) for prompt in prompts]
        return [nth_answer(first, i) for first in firsts for i in range(body.answers)]

    def _generation(self, body: CompletionRequest | ChatRequest, prompt: ChatPrompt) -> Generation:
        """Raises RequestTooLarge if prompt and answer are longer than the model, or the memory, takes."""
        length, limit = len(prompt.tokens), self.engine.max_model_len
        taker = "the model" if limit == self.engine.spec.max_length else "the server's memory"
        if length == 0:
            raise errors.BadRequest("prompt has 0 tokens, at least 1 is needed", "prompt")
        if length >= limit:
            raise RequestTooLarge(f"prompt has {length:,} tokens, {taker} takes {limit:,} with the answer")
        wanted = limit - length if body.wanted_tokens is None else body.wanted_tokens
        if length + wanted > limit:
            raise RequestTooLarge(
                f"prompt has {length:,} tokens and max_tokens is {wanted:,}, {length + wanted:,} together; "
                f"{taker} takes {limit:,}"
            )
        segments = () if body.exact else prompt.segments
        if len(segments) > MAX_SEGMENTS:
            raise errors.BadRequest(
                f"prompt has {len(segments):,} segments, at most {MAX_SEGMENTS:,} are taken", "prompt"
            )
        params = body.params(self.engine.generation_defaults, wanted, body.wanted_logprobs)
        deadline = min((t for t in (body.timeout, self.config.request_timeout) if t is not None), default=None)
        made = Generation(prompt.tokens, params, body.salt, prompt.boundaries, prompt.keep_output, deadline)
        return replace(made, segments=segments, fidelity=body.wanted_fidelity)

    async def _answer(
        self,
        body: CompletionRequest | ChatRequest,
        request: Request,
        form: Form,
        generations: list[Generation],
        record: RequestRecord,
        echo: Echo | None = None,
        worded: Wording | None = None,
    ) -> Response:
        """`echo` gives the events with the prompts before them, where answers are to begin so."""
        exchange = Exchange(self.engine)
        if any(generation.params.constraint for generation in generations):
            await run_in_threadpool(exchange.submit_all, generations)  # compiling one may take a second
        else:
            exchange.submit_all(generations)
        names = None if body.wanted_logprobs is None else self._names
        plain = Reply(form, self.engine.model_name, names, body.answers)
        reply: Answers = plain if worded is None else worded(plain)
        events = record.watch(exchange.events())
        add = echo or (lambda plain: plain)

        def close() -> None:
            exchange.cancel()
            record.close()

        answered = False
        try:
            if body.stream:
                # What fails before its first token is answered with a status of its own, as without a stream.
                begun = await unless_gone(request, anext(events))
                if begun is not None:
                    stream = EventStream(reply.stream(add(resumed(begun, events)), body.include_usage), close)
                    exchange.before_waiting = stream.flush
                    answered = True
                    return stream
            else:
                answer = await unless_gone(request, reply.whole(add(events)))
                if answer is not None:
                    return JSONResponse(answer)
        finally:
            if not answered:
                close()
        return Response(status_code=CLIENT_GONE)


def nth_answer(first: Generation, i: int) -> Generation:
    """The same prompt once more, with a seed of its own."""
    seed = first.params.seed
    return first if i == 0 or seed is None else replace(first, params=replace(first.params, seed=seed + i))


def scoring(generation: Generation, k: int) -> Generation:
    """With log probabilities of its prompt, which is computed whole for them."""
    return replace(generation, params=replace(generation.params, prompt_logprobs=k), segments=())


async def resumed(first: tuple[int, Progress], events: Events) -> Events:
    """The event that was taken from `events`, and those that come after it."""
    yield first
    async for event in events:
        yield event

"""From checked requests to the engine and back: what every route of the API shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.errors import RequestTooLarge, TemplateError
from headwater.server import errors
from headwater.server.chat import ChatPrompt, ChatPrompter, encode
from headwater.server.exchange import Exchange
from headwater.server.logprobs import TokenNames
from headwater.server.openai import ChatRequest, CompletionRequest
from headwater.server.record import RequestRecord
from headwater.server.reply import ChatForm, CompletionForm, Form, Reply
from headwater.server.stream import EventStream, unless_gone
from headwater.server.template import ChatTemplate
from headwater.spec import ModelSpec
from headwater.types import Boundaries, Event, Generation

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


class Service:
    """From checked requests to the engine and back."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self.engine, self.config = engine, config
        self.started = int(time.time())
        self._names = TokenNames(engine.tokenizer)
        engine.tokenizer.no_truncation()
        engine.tokenizer.no_padding()
        self._prompter: ChatPrompter | None = None
        if engine.chat_template is not None:
            template = ChatTemplate(engine.chat_template, engine.special_tokens)
            self._prompter = ChatPrompter(engine.tokenizer, template)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        record = RequestRecord("completion")
        prompts = await run_in_threadpool(lambda: [self._tokens(prompt) for prompt in body.prompts])
        generations = [self._generation(body, ChatPrompt(tokens, Boundaries(), True)) for tokens in prompts]
        return await self._answer(body, request, CompletionForm(), generations, record)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        record = RequestRecord("chat")
        if self._prompter is None:
            raise TemplateError("the model has no chat template: use /v1/completions")
        try:
            conversation = body.conversation
        except ValueError as error:
            raise errors.BadRequest(str(error), "messages") from error
        prompt = await run_in_threadpool(self._prompter.prepare, conversation)
        return await self._answer(body, request, ChatForm(), [self._generation(body, prompt)], record)

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(encode(self.engine.tokenizer, prompt, add_special_tokens=True).ids)
        vocab_size = self.engine.spec.vocab_size
        if max(prompt) >= vocab_size:
            raise errors.BadRequest(f"token id is {max(prompt):,}, the model has {vocab_size:,} tokens", "prompt")
        return tuple(prompt)

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
        params = body.params(self.engine.generation_defaults, wanted, body.wanted_logprobs)
        return Generation(prompt.tokens, params, body.cache_salt, prompt.boundaries, prompt.keep_output)

    async def _answer(
        self,
        body: CompletionRequest | ChatRequest,
        request: Request,
        form: Form,
        generations: list[Generation],
        record: RequestRecord,
    ) -> Response:
        exchange = Exchange(self.engine)
        exchange.submit_all(generations)
        names = None if body.wanted_logprobs is None else self._names
        reply = Reply(form, self.engine.model_name, names)
        events = record.watch(exchange.events())

        def close() -> None:
            exchange.cancel()
            record.close()

        if body.stream:
            return EventStream(reply.stream(events, body.include_usage), close)
        try:
            answer = await unless_gone(request, reply.whole(events))
        finally:
            close()
        return Response(status_code=CLIENT_GONE) if answer is None else JSONResponse(answer)

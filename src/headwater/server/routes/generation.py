"""Endpoints that generate: completions, chat completions, responses and messages. Ollama's are in `ollama`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from headwater.request import Generation
from headwater.server.answer.anthropic import MessagesReply
from headwater.server.answer.forms import ChatForm, CompletionForm, Form, prompt_logprobs
from headwater.server.answer.ollama import OllamaReply
from headwater.server.answer.reply import Echo, Reply, without_echo
from headwater.server.answer.responses import ResponsesReply
from headwater.server.http.errors import ANTHROPIC_BODY_REFUSALS, BadRequest, generated
from headwater.server.http.exchange import (
    CLIENT_GONE,
    Events,
    EventStream,
    Exchange,
    KeepAlive,
    Progress,
    stays,
    unless_gone,
)
from headwater.server.observe.record import RequestRecord
from headwater.server.requests.anthropic import MessagesRequest
from headwater.server.requests.chat import ChatRequest, CompletionRequest
from headwater.server.requests.responses import ResponsesRequest
from headwater.server.requests.sampling import SamplingRequest
from headwater.server.routes.service import Service, json_routes, service_of

AnyReply = Reply | ResponsesReply | MessagesReply | OllamaReply
First = asyncio.Task[tuple[int, Progress]]

PROGRESS_SECONDS = 1.0  # between comments of a stream whose client asks for its prompt's progress

FIELDS = ("id", "object", "created", "model", "choices", "usage", "headwater")
RESPONSES_FIELDS = ("id", "object", "created_at", "model", "status", "output", "usage", "headwater")
MESSAGES_FIELDS = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "headwater")


router = json_routes()


@router.post("/v1/completions", response_model=None, responses=generated(*FIELDS))
async def completions(body: CompletionRequest, request: Request) -> Response:
    service = service_of(request)
    service.lengths.check_answers(len(body.prompts), body.answers)
    generations, echo = await run_in_threadpool(service.completion, body)
    answering = Answering(service, "completion", body, request)
    return await answering.answer(generations, openai_reply(service, CompletionForm, body), echo)


@router.post("/v1/chat/completions", response_model=None, responses=generated(*FIELDS))
async def chat(body: ChatRequest, request: Request) -> Response:
    service = service_of(request)
    service.lengths.check_answers(1, body.answers)
    generations, parser = await run_in_threadpool(service.chat, body)
    reply = openai_reply(service, lambda: ChatForm(parser()), body)
    return await Answering(service, "chat", body, request).answer(generations, reply)


@router.post("/v1/responses", response_model=None, responses=generated(*RESPONSES_FIELDS))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    service = service_of(request)
    generations, parser = await run_in_threadpool(service.chat, body)
    reply = ResponsesReply(body, service.engine.model_name, parser())
    return await Answering(service, "responses", body, request).answer(generations, reply)


@router.post(
    "/v1/messages", response_model=None, responses=generated(*MESSAGES_FIELDS, refused=ANTHROPIC_BODY_REFUSALS)
)
async def messages(body: MessagesRequest, request: Request) -> Response:
    service = service_of(request)
    generations, parser = await run_in_threadpool(service.chat, body)
    n_prompt, grid = len(generations[0].prompt), service.config.resume_grid
    reply = MessagesReply(body, service.engine.model_name, parser(), n_prompt, grid)
    return await Answering(service, "messages", body, request).answer(generations, reply)


def openai_reply(service: Service, form: Callable[[], Form], body: CompletionRequest | ChatRequest) -> Reply:
    """Return the reply to a completion or a chat. Raises BadRequest if a stream is to score its prompt."""
    names, k = service.names, body.prompt_logprobs
    if k is not None and body.stream:
        raise BadRequest(f"prompt_logprobs is {k:,} and stream is true: a stream has none", "prompt_logprobs")
    scores = None if k is None else partial(prompt_logprobs, names, k)
    wanted_names = None if body.wanted_logprobs is None else names
    warnings = body.warnings if isinstance(body, ChatRequest) else []
    return Reply(form, service.engine.model_name, wanted_names, body.answers, scores, warnings)


class Answering:
    """One request while it is answered: its exchange with the engine, and its record."""

    def __init__(self, service: Service, endpoint: str, body: SamplingRequest, request: Request) -> None:
        service.note_model(body.model)
        self._service, self._body, self._request = service, body, request
        self._exchange, self._record = Exchange(service.engine), RequestRecord(endpoint, service.watchers)
        self._events = self._record.watch(self._exchange.events())
        self._first: First | None = None

    async def answer(self, generations: list[Generation], reply: AnyReply, echo: Echo = without_echo) -> Response:
        """Submit the generations and answer as events come; cancel them if the client disconnects."""
        if self._body.stream:
            return await self._streamed(generations, reply, echo)
        await self._submit(generations)
        try:
            whole = await unless_gone(self._request, reply.whole(echo(self._events)))
        finally:
            self._close()
        return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)

    async def _streamed(self, generations: list[Generation], reply: AnyReply, echo: Echo) -> Response:
        """Return a stream after the engine's first event, or `stream_start` seconds after the request's arrival.

        An error before that is answered with its own status, a later one by the stream.
        """
        first = self._first = asyncio.create_task(self._begin(generations))
        left = max(0.0, self._service.config.stream_start - self._record.context.seconds)
        streams = False
        try:
            stayed = await stays(self._request, first, left)
            if first.done():
                first.result()
            streams = stayed
        finally:
            if not streams:
                self._close()
        if not streams:
            return Response(status_code=CLIENT_GONE)
        shown = reply.stream(echo(resumed(first, self._events)), self._body.include_usage)
        keep_alive = KeepAlive(self._period, partial(self._keep_alive, reply), now=not first.done())
        stream = EventStream(shown, self._close, reply.media_type, keep_alive)
        self._exchange.before_waiting = stream.flush
        return stream

    async def _begin(self, generations: list[Generation]) -> tuple[int, Progress]:
        """Submit the generations, and return their first event."""
        try:
            await self._submit(generations)
        except Exception as error:
            if self._record.context.status is not None:  # the stream answers it
                self._record.failed(error)
            raise
        return await anext(self._events)

    async def _submit(self, generations: list[Generation]) -> None:
        self._record.context.charge(sum(len(generation.prompt) for generation in generations))
        if any(generation.params.constraint for generation in generations):
            await run_in_threadpool(self._exchange.submit_all, generations)  # compiling one may take a second
        else:
            self._exchange.submit_all(generations)
        self._service.answering[self._exchange] = self._record

    @property
    def _period(self) -> float:
        period = self._service.config.keep_alive
        return min(period, PROGRESS_SECONDS) if self._body.include_progress else period

    def _keep_alive(self, reply: AnyReply) -> str:
        return reply.keep_alive(self._exchange.prefilled if self._body.include_progress else None)

    def _close(self) -> None:
        self._exchange.cancel()
        if self._first is not None:
            self._first.cancel()
        self._service.answering.pop(self._exchange, None)
        self._record.close()


async def resumed(first: First, events: Events) -> Events:
    """Yield an event that is read from `events` meanwhile, and the events after it."""
    yield await first
    async for event in events:
        yield event

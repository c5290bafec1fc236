"""Endpoints that generate: completions, chat completions and responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from headwater.request import Generation
from headwater.server.answer.forms import ChatForm, CompletionForm, Form
from headwater.server.answer.reply import Reply
from headwater.server.answer.responses import ResponsesReply
from headwater.server.http.errors import generated
from headwater.server.http.exchange import Events, EventStream, Exchange, Progress, unless_gone
from headwater.server.observe.record import RequestRecord
from headwater.server.requests.chat import ChatRequest, CompletionRequest, ConversationRequest
from headwater.server.requests.responses import ResponsesRequest
from headwater.server.routes.service import Service

CLIENT_GONE = 499  # status in the log if the client disconnected
FIELDS = ("id", "object", "created", "model", "choices", "usage", "headwater")
RESPONSES_FIELDS = ("id", "object", "created_at", "model", "status", "output", "usage", "headwater")


class Replies(Protocol):
    """Answer to a request from its events, whole or as server-sent events."""

    async def whole(self, events: Events) -> dict[str, Any]: ...

    def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]: ...


def install(app: FastAPI, service: Service) -> None:
    """Add /v1/completions, /v1/chat/completions and /v1/responses."""
    model = service.engine.model_name

    def reply(form: Form, body: CompletionRequest | ChatRequest) -> Reply:
        return Reply(form, model, None if body.wanted_logprobs is None else service.names, body.answers)

    @app.post("/v1/completions", response_model=None, responses=generated(*FIELDS))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        record = RequestRecord("completion", service.watchers)
        service.lengths.check_answers(len(body.prompts), body.answers)
        service.lengths.check_max_tokens(body.max_tokens, body.scores_prompt)
        generations, echo = await run_in_threadpool(service.completion, body)
        exchange = await submitted(service, generations)
        events = record.watch(exchange.events())
        events = events if echo is None else echo(events)
        return await answer(body, request, exchange, record, events, reply(CompletionForm(), body))

    @app.post("/v1/chat/completions", response_model=None, responses=generated(*FIELDS))
    async def chat(body: ChatRequest, request: Request) -> Response:
        record = RequestRecord("chat", service.watchers)
        service.lengths.check_answers(1, body.answers)
        generations, parser = await run_in_threadpool(service.chat, body)
        exchange = await submitted(service, generations)
        events = record.watch(exchange.events())
        return await answer(body, request, exchange, record, events, reply(ChatForm(parser), body))

    @app.post("/v1/responses", response_model=None, responses=generated(*RESPONSES_FIELDS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        record = RequestRecord("responses", service.watchers)
        generations, parser = await run_in_threadpool(service.chat, body)
        exchange = await submitted(service, generations)
        events = record.watch(exchange.events())
        return await answer(body, request, exchange, record, events, ResponsesReply(body, model, parser()))


async def submitted(service: Service, generations: list[Generation]) -> Exchange:
    """Submit the generations of a request; on a thread if a constraint has to be compiled, which may take a second."""
    exchange = Exchange(service.engine)
    if any(generation.params.constraint for generation in generations):
        await run_in_threadpool(exchange.submit_all, generations)
    else:
        exchange.submit_all(generations)
    return exchange


async def answer(
    body: CompletionRequest | ConversationRequest,
    request: Request,
    exchange: Exchange,
    record: RequestRecord,
    events: Events,
    reply: Replies,
) -> Response:
    """Answer a request as its events come; cancel its generations if the client disconnects."""

    def close() -> None:
        exchange.cancel()
        record.close()

    streaming = False
    try:
        if body.stream:
            # an error before the first event is answered with its own status, as without a stream
            first = await unless_gone(request, anext(events))
            if first is not None:
                stream = EventStream(reply.stream(resumed(first, events), body.include_usage), close)
                exchange.before_waiting = stream.flush
                streaming = True
                return stream
        else:
            whole = await unless_gone(request, reply.whole(events))
            if whole is not None:
                return JSONResponse(whole)
    finally:
        if not streaming:
            close()
    return Response(status_code=CLIENT_GONE)


async def resumed(first: tuple[int, Progress], events: Events) -> Events:
    """Yield an event that was taken from `events`, and the events after it."""
    yield first
    async for event in events:
        yield event

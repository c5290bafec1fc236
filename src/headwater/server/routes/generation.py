"""Endpoints that generate: completions, chat completions, responses and messages. Ollama's are in `ollama`."""

from __future__ import annotations

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
from headwater.server.http.exchange import CLIENT_GONE, Events, EventStream, Exchange, Progress, unless_gone
from headwater.server.observe.record import RequestRecord
from headwater.server.requests.anthropic import MessagesRequest
from headwater.server.requests.chat import ChatRequest, CompletionRequest
from headwater.server.requests.responses import ResponsesRequest
from headwater.server.requests.sampling import SamplingRequest
from headwater.server.routes.service import Service, json_routes, service_of

AnyReply = Reply | ResponsesReply | MessagesReply | OllamaReply

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
    n_prompt, page_size = len(generations[0].prompt), service.config.page_size
    reply = MessagesReply(body, service.engine.model_name, parser(), n_prompt, page_size)
    return await Answering(service, "messages", body, request).answer(generations, reply)


def openai_reply(service: Service, form: Callable[[], Form], body: CompletionRequest | ChatRequest) -> Reply:
    """Return the reply to a completion or a chat. Raises BadRequest if a stream is to score its prompt."""
    names, k = service.names, body.prompt_logprobs
    if k is not None and body.stream:
        raise BadRequest(f"prompt_logprobs is {k:,} and stream is true: a stream has none", "prompt_logprobs")
    scores = None if k is None else partial(prompt_logprobs, names, k)
    wanted_names = None if body.wanted_logprobs is None else names
    return Reply(form, service.engine.model_name, wanted_names, body.answers, scores)


class Answering:
    """One request while it is answered: its exchange with the engine, and its record."""

    def __init__(self, service: Service, endpoint: str, body: SamplingRequest, request: Request) -> None:
        service.note_model(body.model)
        self._body, self._request = body, request
        self._exchange, self._record = Exchange(service.engine), RequestRecord(endpoint, service.watchers)

    async def answer(self, generations: list[Generation], reply: AnyReply, echo: Echo = without_echo) -> Response:
        """Submit the generations and answer as events come; cancel them if the client disconnects."""
        if any(generation.params.constraint for generation in generations):
            await run_in_threadpool(self._exchange.submit_all, generations)  # compiling one may take a second
        else:
            self._exchange.submit_all(generations)
        events = self._record.watch(self._exchange.events())
        if self._body.stream:
            return await self._streamed(events, reply, echo)
        try:
            whole = await unless_gone(self._request, reply.whole(echo(events)))
        finally:
            self._close()
        return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)

    async def _streamed(self, events: Events, reply: AnyReply, echo: Echo) -> Response:
        """Return a stream after the engine's first event; an error before that is answered with its own status."""
        first = None
        try:
            first = await unless_gone(self._request, anext(events))
        finally:
            if first is None:
                self._close()
        if first is None:
            return Response(status_code=CLIENT_GONE)
        shown = echo(resumed(first, events))
        stream = EventStream(reply.stream(shown, self._body.include_usage), self._close, reply.media_type)
        self._exchange.before_waiting = stream.flush
        return stream

    def _close(self) -> None:
        self._exchange.cancel()
        self._record.close()


async def resumed(first: tuple[int, Progress], events: Events) -> Events:
    """Yield an event that was read from `events`, and the events after it."""
    yield first
    async for event in events:
        yield event

"""Work around every HTTP request (id, context, count of running ones), and while the app runs (`during`)."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER, ANTHROPIC_HEADER = "x-request-id", "request-id"
USABLE = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # the ids that a client may choose

_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


@dataclass(eq=False)
class RequestContext:
    """One HTTP request, from its head to the last byte of its answer. Its answer, log lines and spans share its id."""

    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    traceparent: str | None = None  # W3C Trace Context, as the client sent it
    tracestate: str | None = None
    path: str = ""
    started_at: float = field(default_factory=time.time)  # wall clock
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None  # HTTP status; None: no head of an answer was sent
    outcome: str | None = None  # an outcome that the status does not show: "cancelled", "failed"

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started


def current_context() -> RequestContext:
    """Return the context of the request that is being answered, or a new one outside of any request."""
    return _current.get() or RequestContext()


def current_request_id() -> str | None:
    """Return the id of the request that is being answered, None outside of any request."""
    context = _current.get()
    return None if context is None else context.id


class Identified:
    """Middleware that gives each request its context and each answer its id, and calls `ended` at the request's end."""

    def __init__(self, app: ASGIApp, ended: Callable[[RequestContext], None]) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = _context_of(scope)
        _current.set(context)  # uvicorn answers each request in a task of its own: nothing to reset

        async def identify(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers[ANTHROPIC_HEADER] = context.id
            await send(message)

        try:
            await self._app(scope, receive, identify)
        except Exception:
            context.outcome = "failed"
            raise
        finally:
            self._ended(context)


def _context_of(scope: Scope) -> RequestContext:
    headers = Headers(scope=scope)
    context = RequestContext(
        traceparent=headers.get("traceparent"), tracestate=headers.get("tracestate"), path=scope["path"]
    )
    chosen = headers.get(HEADER, "")
    if USABLE.fullmatch(chosen):
        context.id = chosen
    return context


def around(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Wrap the app's whole stack of middleware, including the middleware that answers errors.

    The last wrapper added sees a request first.
    """
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build())  # type: ignore[method-assign]


def during(app: FastAPI, part: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Enter `part` when the app starts, after the parts that were added before, and leave it when the app ends."""
    outer = app.router.lifespan_context

    @asynccontextmanager
    async def both(started: FastAPI) -> AsyncIterator[Any]:
        async with outer(started) as state, part():
            yield state

    app.router.lifespan_context = both


class InFlight:
    """Count of the requests that compute, from the last byte of their bodies to the last byte of their answers."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app so that its POST requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            arrived = False

            async def watched() -> Message:
                nonlocal arrived
                message = await receive()
                if not arrived and message["type"] == "http.request" and not message.get("more_body"):
                    arrived = True
                    self.count += 1
                return message

            try:
                await app(scope, watched, send)
            finally:
                self.count -= arrived

        return counted

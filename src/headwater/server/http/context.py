"""Who a request is: an id that its answer, its log lines and its spans share."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
USABLE = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # what a client may choose as its id

_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


@dataclass(eq=False)
class RequestContext:
    """One HTTP request, from its head to the last byte of its answer."""

    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    traceparent: str | None = None  # of W3C Trace Context, as the client sent it
    tracestate: str | None = None
    path: str = ""
    started_at: float = field(default_factory=time.time)  # of the wall's clock
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None  # of HTTP; None: no head of an answer was sent
    outcome: str | None = None  # what the status does not tell: "cancelled", "failed"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def current_context() -> RequestContext:
    """Of the request that is being answered; a new one outside of any."""
    return _current.get() or RequestContext()


def current_request_id() -> str | None:
    context = _current.get()
    return None if context is None else context.id


class Identified:
    """Middleware: gives each request its context, and each answer its id. `ended` hears of the request's end."""

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
                MutableHeaders(scope=message)[HEADER] = context.id
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
    wished = headers.get(HEADER, "")
    if USABLE.fullmatch(wished):
        context.id = wished
    return context

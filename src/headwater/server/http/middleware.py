"""Middleware around every HTTP request: id, context, count of running ones; hosts, origins and API keys."""

from __future__ import annotations

import base64
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.config import ServeConfig
from headwater.server.http.error_forms import error_answer
from headwater.server.http.keys import Tenant, Tenants

HEADER, ANTHROPIC_HEADER = "x-request-id", "request-id"
USABLE = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # the ids that a client may choose
OPEN_PATHS = ("/health", "/health/live", "/health/ready")  # need no key
EXPOSED = ("retry-after", HEADER, ANTHROPIC_HEADER)  # headers that a browser's script may read
HOST = re.compile(r"(?:\[([^\]@]*)\]|([^:@]*))(?::[0-9]*)?")  # IPv6 in brackets, or a name; and a port
MAX_SHOWN = 100  # characters of a host or a path that are repeated

log = logging.getLogger("headwater.request")

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
    tenant: Tenant | None = None  # None: no key is needed, or none was sent
    model: str = ""  # that answers, if the process serves several

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self.started

    @property
    def key_name(self) -> str:
        """Name of the API key, for logs and metrics; empty without one, and for the only key of a server."""
        return "" if self.tenant is None else self.tenant.key.name

    @property
    def labels(self) -> dict[str, str]:
        """Fields of JSON with the names of the API key and of the model, if they tell requests apart."""
        return {name: value for name, value in (("key", self.key_name), ("model", self.model)) if value}

    def charge(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer against the limit of the key."""
        if self.tenant is not None:
            self.tenant.charge(tokens)


def current_context() -> RequestContext:
    """Return the context of the request that is being answered, or a new one outside of any request."""
    return _current.get() or RequestContext()


def current_request_id() -> str | None:
    """Return the id of the request that is being answered, None outside of any request."""
    context = _current.get()
    return None if context is None else context.id


def current_namespace(salt: str | None) -> str:
    """Return the cache's namespace for the request that is being answered: of its key, within it of its salt."""
    tenant = current_context().tenant
    return salt or "" if tenant is None else tenant.key.namespace_of(salt or "")


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


def install_access(app: FastAPI, config: ServeConfig) -> None:
    """Guard every path, outside of error handling: a page of another origin may read the answer to an error, too.

    The app's `state.in_flight` counts the requests that were admitted; `state.renewals` are to be called at SIGHUP.
    """
    in_flight, tenants = InFlight(), Tenants(config)

    def guarded(stack: ASGIApp) -> ASGIApp:
        stack = in_flight.counting(stack)
        if tenants:
            stack = KeyCheck(stack, tenants)
        if config.cors:
            stack = CORSMiddleware(stack, config.cors, allow_methods="*", allow_headers="*", expose_headers=EXPOSED)
        return stack if "*" in config.allowed_hosts else HostCheck(stack, config.allowed_hosts)

    app.state.in_flight = in_flight
    app.state.renewals = [] if config.api_key_file is None else [tenants.renew]
    around(app, guarded)


class HostCheck:
    """Middleware that answers 403 to a connection on a loopback address whose Host header names another machine.

    It stops DNS rebinding: a page from anywhere, whose name resolves to 127.0.0.1 after the browser has loaded it, has
    the origin of this server for the browser, but its requests keep the page's name in the Host header. (CVE-2024-28224
    was this gap in another server.) A Unix socket, which no page reaches, has no such check.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app, self._allowed = app, frozenset(map(str.lower, allowed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not is_loopback((scope.get("server") or ("",))[0]):
            await self._app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        if self._admits(host_name(host)):
            await self._app(scope, receive, send)
        else:
            await self._refusal(host, scope)(scope, receive, send)

    def _admits(self, name: str) -> bool:
        """Return whether requests for this name are served. An empty name, only in HTTP/1.0, is never a page's."""
        return not name or name == "localhost" or is_loopback(name) or name in self._allowed

    def _refusal(self, host: str, scope: Scope) -> JSONResponse:
        served = ", ".join(("localhost", "127.0.0.1", "[::1]", *sorted(self._allowed)))
        shown = ascii(host[:MAX_SHOWN])
        message = f"Host is {shown}, on a loopback address {served} are served; --allowed-hosts takes further names"
        return _refusal(scope, 403, message, "permission_error", "host_not_allowed", {})


def host_name(host: str) -> str:
    """Return the name of a Host header, in lower case, without a port, the brackets of IPv6 and the root's dot.

    Anything else than a name and a port is returned whole: `localhost:80@evil` is not localhost.
    """
    name = host.strip().lower()
    found = HOST.fullmatch(name)
    return name if found is None else (found[1] or found[2]).removesuffix(".")


def is_loopback(address: str) -> bool:
    """Return whether a text is an IP address of the loopback interface, as IPv4, IPv6, or IPv4 within IPv6."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


class KeyCheck:
    """Middleware that answers 401 to every request without a key, and 429 to POST requests beyond the key's limits.

    A client sends a key as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as the password of HTTP Basic with any
    user name, so that a browser can ask for it.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        keys = [header.encode("latin-1") for header in headers.getlist("x-api-key")]
        keys += [_of_authorization(header) for header in headers.getlist("authorization")]
        tenant = current_context().tenant = self._tenants.find(keys)
        answer: ASGIApp = self._app
        if tenant is None or tenant.has_ended:
            answer = _unauthorized(scope, headers, tenant)
        elif scope["method"] == "POST":
            answer = self._limited(tenant, scope)
        await answer(scope, receive, send)

    def _limited(self, tenant: Tenant, scope: Scope) -> ASGIApp:
        refusal = tenant.refusal()
        if refusal is not None:
            return _too_many(scope, *refusal)
        tenant.begin()

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                tenant.end()

        return counted


def _unauthorized(scope: Scope, headers: Headers, tenant: Tenant | None) -> JSONResponse:
    by_browser = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
    scheme = 'Basic realm="headwater", charset="UTF-8"' if by_browser else 'Bearer realm="headwater"'
    sent = "authorization" in headers or "x-api-key" in headers
    message = "the API key is wrong" if sent else "an API key is needed: send it as 'Authorization: Bearer KEY'"
    if tenant is not None:
        message = f"the API key has ended at {tenant.key.until:%F %R %Z}"
    return _refusal(scope, 401, message, "authentication_error", "invalid_api_key", {"www-authenticate": scheme})


def _too_many(scope: Scope, message: str, seconds: int) -> JSONResponse:
    message = f"{message}; retry after {seconds:,} s"
    return _refusal(scope, 429, message, "rate_limit_error", "rate_limit_exceeded", {"retry-after": str(seconds)})


def _refusal(scope: Scope, status: int, message: str, kind: str, code: str, headers: dict[str, str]) -> JSONResponse:
    name = current_context().key_name
    log.info("refused %s status=%d: %s%s", scope["path"][:MAX_SHOWN], status, message, f" key={name}" if name else "")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse(error_answer(scope["path"], status, error, current_request_id()), status, headers)


def _of_authorization(header: str) -> bytes:
    """Return the key in an Authorization header; empty without one: no key is empty."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except ValueError:  # not base64, or not ASCII
            return b""
    return b""

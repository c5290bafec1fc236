"""Access to the API: host names on loopback, origins of browsers' pages, and the API key."""

from __future__ import annotations

import base64
import hmac
import logging
from ipaddress import IPv6Address, ip_address

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.config import ServeConfig
from headwater.server.http.error_forms import error_answer
from headwater.server.http.middleware import ANTHROPIC_HEADER, HEADER, InFlight, around, current_request_id

OPEN_PATHS = ("/health",)  # need no key
EXPOSED = ("retry-after", HEADER, ANTHROPIC_HEADER)  # headers that a browser's script may read
MAX_SHOWN = 100  # characters of a host that an error repeats

log = logging.getLogger("headwater.request")


def install_access(app: FastAPI, config: ServeConfig) -> None:
    """Guard every path, outside of error handling: a page of another origin may read the answer to an error, too.

    The app's `state.in_flight` counts the requests that were admitted.
    """
    in_flight, key = InFlight(), config.required_key()

    def guarded(stack: ASGIApp) -> ASGIApp:
        stack = in_flight.counting(stack)
        if key is not None:
            stack = KeyCheck(stack, key)
        if config.cors:
            stack = CORSMiddleware(stack, config.cors, allow_methods="*", allow_headers="*", expose_headers=EXPOSED)
        return stack if "*" in config.allowed_hosts else HostCheck(stack, config.allowed_hosts)

    app.state.in_flight = in_flight
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
            await self._refuse(host, scope, receive, send)

    def _admits(self, name: str) -> bool:
        """Return whether requests for this name are served. An empty name, only in HTTP/1.0, is never a page's."""
        return not name or name == "localhost" or is_loopback(name) or name in self._allowed

    async def _refuse(self, host: str, scope: Scope, receive: Receive, send: Send) -> None:
        served = ", ".join(("localhost", "127.0.0.1", "[::1]", *sorted(self._allowed)))
        shown = ascii(host[:MAX_SHOWN])
        message = f"Host is {shown}, on a loopback address {served} are served; --allowed-hosts takes further names"
        log.info("refused %s status=403: Host is %s", scope["path"][:MAX_SHOWN], shown)
        error = {"message": message, "type": "permission_error", "param": None, "code": "host_not_allowed"}
        body = error_answer(scope["path"], 403, error, current_request_id())
        await JSONResponse(body, 403)(scope, receive, send)


def host_name(host: str) -> str:
    """Return the name of a Host header, in lower case, without a port, the brackets of IPv6 and the root's dot."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def is_loopback(address: str) -> bool:
    """Return whether a text is an IP address of the loopback interface, as IPv4, IPv6, or IPv4 within IPv6."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


class KeyCheck:
    """Middleware that answers 401 to every request without the key.

    A client sends it as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as the password of HTTP Basic with any
    user name, so that a browser can ask for it.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        """Compare in a time that does not depend on the key."""
        keys = [header.encode("latin-1") for header in headers.getlist("x-api-key")]
        keys += [_of_authorization(header) for header in headers.getlist("authorization")]
        return any([hmac.compare_digest(key, self._key) for key in keys])

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        by_browser = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        scheme = 'Basic realm="headwater", charset="UTF-8"' if by_browser else 'Bearer realm="headwater"'
        sent = "authorization" in headers or "x-api-key" in headers
        message = "the API key is wrong" if sent else "an API key is needed: send it as 'Authorization: Bearer KEY'"
        log.info("refused %s status=401: %s", scope["path"], message)
        error = {"message": message, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
        body = error_answer(scope["path"], 401, error, current_request_id())
        response = JSONResponse(body, 401, {"www-authenticate": scheme})
        await response(scope, receive, send)


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

"""Who may call: whoever brings the key, and pages of the origins that are let in."""

from __future__ import annotations

import base64
import hmac
import logging

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.server.http.draining import InFlight
from headwater.server.routes.service import Service

OPEN_PATHS = ("/health",)  # need no key
EXPOSED = ("retry-after", "x-request-id")  # headers that a browser's script may read

log = logging.getLogger("headwater.request")


def install(app: FastAPI, service: Service) -> None:
    """Guard every path, from without what answers errors: so a page may read the answer to an error too.

    The app's `state.in_flight` counts the requests that were let in.
    """
    config, in_flight, build = service.config, InFlight(), app.build_middleware_stack
    key = config.required_key()

    def guarded_stack() -> ASGIApp:
        stack: ASGIApp = in_flight.counting(build())
        if key is not None:
            stack = KeyCheck(stack, key)
        if config.cors:
            stack = CORSMiddleware(stack, config.cors, allow_methods="*", allow_headers="*", expose_headers=EXPOSED)
        return stack

    app.state.in_flight = in_flight
    app.build_middleware_stack = guarded_stack


class KeyCheck:
    """Answers 401 to every request that does not bring the key.

    It is brought as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as the password of HTTP Basic, whatever the
    user's name: so a browser can ask for it.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._brings_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    def _brings_key(self, headers: Headers) -> bool:
        """Compares in a time that tells nothing of the key."""
        brought = [header.encode("latin-1") for header in headers.getlist("x-api-key")]
        brought += [_of_authorization(header) for header in headers.getlist("authorization")]
        return any([hmac.compare_digest(key, self._key) for key in brought])

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        by_browser = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        scheme = 'Basic realm="headwater", charset="UTF-8"' if by_browser else 'Bearer realm="headwater"'
        sent = "authorization" in headers or "x-api-key" in headers
        message = "the API key is wrong" if sent else "an API key is needed: send it as 'Authorization: Bearer KEY'"
        log.info("refused %s status=401: %s", scope["path"], message)
        error = {"message": message, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
        response = JSONResponse({"error": error}, 401, {"www-authenticate": scheme})
        await response(scope, receive, send)


def _of_authorization(header: str) -> bytes:
    """The key in an Authorization header; empty, which no key is, if there is none."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except ValueError:  # no base64, or not even ASCII
            return b""
    return b""

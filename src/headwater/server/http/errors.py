"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headwater.errors import (
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    OutOfPages,
    QueueFull,
    RequestTooLarge,
    TemplateError,
)
from headwater.server.http.context import current_request_id

log = logging.getLogger("headwater.request")


@dataclass(frozen=True, slots=True)
class Kind:
    """How errors of one class are answered."""

    status: int
    type: str
    code: str | None
    headers: Mapping[str, str] = field(default_factory=dict)


RETRY_AFTER = 5  # seconds after which another server should have taken over from one that stopped

# OpenAI's clients send again what was answered with 408, 409, 429 or 5xx, unless `x-should-retry` says no. A queue
# that is full asks for it, and says when. A deadline that was missed does not: the same request would take as long
# once more, from a server that is late already.
KINDS: dict[type[Exception], Kind] = {
    RequestTooLarge: Kind(400, "invalid_request_error", "context_length_exceeded"),
    TemplateError: Kind(400, "invalid_request_error", "chat_template"),
    ConstraintError: Kind(400, "invalid_request_error", "invalid_constraint"),
    QueueFull: Kind(503, "service_unavailable", "queue_full"),
    EngineStopped: Kind(503, "service_unavailable", "engine_stopped", {"retry-after": str(RETRY_AFTER)}),
    OutOfPages: Kind(503, "service_unavailable", "out_of_memory", {"retry-after": str(RETRY_AFTER)}),
    DeadlineExceeded: Kind(504, "timeout", "deadline_exceeded", {"x-should-retry": "false"}),
}

MAX_ECHO = 100  # characters of a bad value that an error repeats


class BadRequest(Exception):
    """A request that is the client's to mend; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. What nobody foresaw is logged here, and told without its insides, by the request's id."""
    if isinstance(error, BadRequest):
        return 400, _body(str(error), "invalid_request_error", error.param, None)
    kind = kind_of(error)
    if kind is not None:
        return kind.status, _body(str(error), kind.type, None, kind.code)
    request_id = current_request_id()
    log.error("internal error in request %s", request_id, exc_info=error)
    message = f"internal error: {type(error).__name__}, in request {request_id}"
    return 500, _body(message, "server_error", None, "internal_error")


def error_headers(error: Exception) -> dict[str, str]:
    """When, and whether, to try again."""
    if isinstance(error, QueueFull):
        return {"retry-after": str(error.retry_after)}
    kind = kind_of(error)
    return {} if kind is None else dict(kind.headers)


def kind_of(error: Exception) -> Kind | None:
    """How an error is answered that was foreseen; None for one that was not."""
    return next((kind for name, kind in KINDS.items() if isinstance(error, name)), None)


def install(app: FastAPI) -> None:
    """Let every error that leaves a route be answered in OpenAI's form."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (*KINDS, BadRequest, Exception):
        app.add_exception_handler(kind, _raised)


async def _raised(request: Request, error: Exception) -> JSONResponse:
    noted = _invalid_field(error.param) if isinstance(error, BadRequest) else None
    return _refuse(request, *error_body(error), error_headers(error), noted)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])[:MAX_ECHO] or None  # keys in it are the client's
    own = first["type"] == "value_error"  # our words, which name the fields that they are about
    message = first["msg"].removeprefix("Value error, ")
    if param and isinstance(first["input"], int | float | str):
        message += f"; it is {shown(first['input'])}"
    text = message if own and not param else f"{param or 'body'}: {message}"
    at_fault = param or (message.split()[0] if own else "body")  # our words begin with a field's name
    return _refuse(request, 400, _body(text, "invalid_request_error", param, None), noted=_invalid_field(at_fault))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = _body(f"{error.detail}: {request.method} {request.url.path}", "invalid_request_error", None, None)
    return _refuse(request, error.status_code, body, error.headers)


def _invalid_field(param: str) -> str:
    """What the log says of a value that is refused: not the value, which may be a part of a prompt."""
    return f"{param[:MAX_ECHO]} is invalid"


def _refuse(
    request: Request,
    status: int,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    noted: str | None = None,
) -> JSONResponse:
    """`noted`: what the log says in the place of the message."""
    log.info("refused %s status=%d: %s", request.url.path, status, noted or body["error"]["message"])
    return JSONResponse(body, status, headers)


def shown(value: object) -> str:
    """As much of a bad value as an error repeats; nothing in it that could not be written as UTF-8."""
    return ascii(value[:MAX_ECHO] if isinstance(value, str) else value)[:MAX_ECHO]


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

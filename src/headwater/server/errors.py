"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headwater.errors import EngineStopped, OutOfPages, RequestTooLarge, TemplateError

log = logging.getLogger("headwater.request")

# by class of error: HTTP status, type, code
STATUS: dict[type[Exception], tuple[int, str, str | None]] = {
    RequestTooLarge: (400, "invalid_request_error", "context_length_exceeded"),
    TemplateError: (400, "invalid_request_error", "chat_template"),
    EngineStopped: (503, "service_unavailable", "engine_stopped"),
    OutOfPages: (503, "service_unavailable", "out_of_memory"),
}

MAX_ECHO = 100  # characters of a bad value that an error repeats


class BadRequest(Exception):
    """A request that is the client's to mend; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. What nobody foresaw is logged here, and told without its insides."""
    for kind, (status, name, code) in STATUS.items():
        if isinstance(error, kind):
            return status, _body(str(error), name, None, code)
    if isinstance(error, BadRequest):
        return 400, _body(str(error), "invalid_request_error", error.param, None)
    log.error("internal error", exc_info=error)
    return 500, _body(f"internal error: {type(error).__name__}", "server_error", None, None)


def install(app: FastAPI) -> None:
    """Let every error that leaves a route be answered in OpenAI's form."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (*STATUS, BadRequest, Exception):
        app.add_exception_handler(kind, _raised)


async def _raised(request: Request, error: Exception) -> JSONResponse:
    return _refuse(request, *error_body(error))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    message = first["msg"].removeprefix("Value error, ")
    if param and isinstance(first["input"], int | float | str):
        message += f"; it is {repr(first['input'])[:MAX_ECHO]}"
    text = f"{param}: {message}" if param else message
    return _refuse(request, 400, _body(text, "invalid_request_error", param, None))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _refuse(request, error.status_code, _body(message, "invalid_request_error", None, None))


def _refuse(request: Request, status: int, body: dict[str, Any]) -> JSONResponse:
    log.info("refused %s status=%d: %s", request.url.path, status, body["error"]["message"])
    return JSONResponse(body, status)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

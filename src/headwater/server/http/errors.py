"""Errors as answers: message, type, param and code in the form of each API, and their descriptions in /openapi.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from headwater.errors import (
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    ModelUnavailable,
    OutOfPages,
    QueueFull,
    RequestTooLarge,
    TemplateError,
    UnknownModel,
    for_log,
)
from headwater.server.http.error_forms import AnthropicRefusal, OllamaRefusal, Refusal, error_answer
from headwater.server.http.middleware import current_request_id

log = logging.getLogger("headwater.request")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """HTTP status, type, code and headers of the answer to one class of errors."""

    status: int
    type: str
    code: str | None
    headers: Mapping[str, str] = field(default_factory=dict)


RETRY_AFTER_SECONDS = 5  # seconds after which another server should have taken over from a stopped one

# OpenAI's clients repeat a request that was answered with 408, 409, 429 or 5xx, unless `x-should-retry` says no. A full
# queue asks for it and says when. A missed deadline does not: the same request would take as long again, from a server
# that is late already.
KINDS: dict[type[Exception], Kind] = {
    RequestTooLarge: Kind(400, "invalid_request_error", "context_length_exceeded"),
    TemplateError: Kind(400, "invalid_request_error", "chat_template"),
    ConstraintError: Kind(400, "invalid_request_error", "invalid_constraint"),
    UnknownModel: Kind(404, "invalid_request_error", "model_not_found"),
    QueueFull: Kind(503, "service_unavailable", "queue_full"),
    EngineStopped: Kind(503, "service_unavailable", "engine_stopped", {"retry-after": str(RETRY_AFTER_SECONDS)}),
    ModelUnavailable: Kind(503, "service_unavailable", "model_unavailable", {"x-should-retry": "false"}),
    OutOfPages: Kind(503, "service_unavailable", "out_of_memory", {"retry-after": str(RETRY_AFTER_SECONDS)}),
    DeadlineExceeded: Kind(504, "timeout", "deadline_exceeded", {"x-should-retry": "false"}),
}

# path -> the field with the prompt, which has to change if it is too long; "messages" at all others
PROMPTS = dict.fromkeys(("/v1/completions", "/tokenize", "/api/generate"), "prompt")
PROMPTS |= {"/v1/responses": "input", "/cache/segments": "texts"}

MAX_ECHO_CHARACTERS = 100  # characters of a bad value that an error repeats


TYPES = "headwater.types"  # in a request's scope: the JSON types of its body's fields
MODEL = "headwater.model"  # likewise: the model that its body names
JSON_TYPES = {
    type(None): "null", bool: "a boolean", int | float: "a number", str: "a string", list: "a list", dict: "an object",
    object: "a value",
}  # fmt: skip
TYPE_IN_MESSAGE = re.compile(r"of type '([a-z_0-9]+)'")
# values of `type` in OpenAI's API, in tools, parts of content, items and formats: names of the API, not of the client
KNOWN_TYPES = frozenset({
    "allowed_tools", "apply_patch", "audio", "code_interpreter", "computer", "computer_call", "computer_use_preview",
    "custom", "custom_tool_call", "file", "file_search", "file_search_call", "function", "function_call",
    "image_generation", "image_url", "input_audio", "input_file", "input_image", "input_text", "input_video",
    "item_reference", "json_object", "json_schema", "local_shell", "mcp", "namespace", "output_text", "reasoning",
    "refusal", "regex", "shell", "text", "video_url", "web_search", "web_search_call", "web_search_preview",
})  # fmt: skip


class BadRequest(Exception):
    """Invalid request; `param` is the field that the client has to change."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class RefusedBody(HTTPException):
    """Body that is refused before all of it was read; the connection is closed, so that the rest is not read."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message, {"connection": "close"})
        self.code = code


FIELD = "headwater_field"  # type of pydantic's error for a field that a validator of the whole object names


def of_field(name: str, message: str) -> PydanticCustomError:
    """Return an error for validators of whole objects to raise; `name` is the field that the client has to change."""
    return PydanticCustomError(FIELD, "{message}", {"field": name, "message": message})


def error_body(error: Exception) -> tuple[int, Json]:
    """Return HTTP status and body. An unexpected error is logged here, and its answer has only its type and an id."""
    if isinstance(error, BadRequest):
        return 400, _body(str(error), "invalid_request_error", error.param, None)
    kind = kind_of(error)
    if kind is not None:
        return kind.status, _body(str(error), kind.type, getattr(error, "param", None), kind.code)
    request_id = current_request_id()
    log.error("internal error in request %s", request_id, exc_info=error)
    message = f"internal error: {type(error).__name__}, in request {request_id}"
    return 500, _body(message, "server_error", None, "internal_error")


def error_headers(error: Exception) -> dict[str, str]:
    """Return the headers that say whether and when to retry."""
    if isinstance(error, QueueFull):
        return {"retry-after": str(error.retry_after)}
    kind = kind_of(error)
    return {} if kind is None else dict(kind.headers)


def kind_of(error: Exception) -> Kind | None:
    """Return the answer's kind for an expected error, None for an unexpected one."""
    return next((kind for name, kind in KINDS.items() if isinstance(error, name)), None)


def install(app: FastAPI) -> None:
    """Answer every error that leaves a route in the form of its API."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (*KINDS, BadRequest, Exception):
        app.add_exception_handler(kind, _raised)
    _describe_no_422(app)


async def _raised(request: Request, error: Exception) -> JSONResponse:
    logged = for_log(error)
    if isinstance(error, BadRequest):
        top = error.param.partition(".")[0]
        logged = _invalid_field(error.param, request.scope.get(TYPES, {}).get(top, ""), str(error))
    status, body = error_body(error)
    if isinstance(error, RequestTooLarge | TemplateError):
        body["error"]["param"] = PROMPTS.get(request.url.path, "messages")
    return _refuse(request, status, body, error_headers(error), logged)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = _place(first["loc"][1:], error.body, first["type"] == "missing")
    named = [first["ctx"]["field"]] if first["type"] == FIELD else []
    param = ".".join(place + named)[:MAX_ECHO_CHARACTERS] or None  # may hold keys that the client chose
    message = first["msg"].removeprefix("Value error, ")
    if place and isinstance(first["input"], int | float | str):
        message += f"; it is {shown(first['input'])}"
    own = first["type"] == "value_error"  # raised by this server: the message begins with a field's name
    text = message if (named or own) and not place else f"{param or 'body'}: {message}"
    value, missing = first["input"], first["type"] == "missing"
    key = named[0] if named else message.split()[0] if own and not param else None
    if key is not None and isinstance(value, dict):  # of the whole object, of which a field is at fault
        missing = key not in value
        value = value.get(key)
    logged = _invalid_field(param or key or "body", "missing" if missing else json_type(value), message)
    return _refuse(request, 400, _body(text, "invalid_request_error", param, None), logged=logged)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = error.code if isinstance(error, RefusedBody) else None
    body = _body(f"{error.detail}: {request.method} {request.url.path}", "invalid_request_error", None, code)
    return _refuse(request, error.status_code, body, error.headers)


def _place(location: Sequence[int | str], body: Any, missing: bool) -> list[str]:
    """Return the keys that lead to a value of the body, without the types that pydantic tried on the way.

    `missing`: the last key is not in the body. Without a body all of the location is returned.
    """
    if body is None:
        return [str(part) for part in location]
    place = []
    for number, part in enumerate(location):
        inside = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if inside:
            body = body[part]
        if inside or (missing and number == len(location) - 1):
            place.append(str(part))
    return place


def _invalid_field(param: str, json_type: str, message: str) -> str:
    """Describe a refused value for the log by its type, without the value, which may be a part of a prompt.

    A type that OpenAI's API defines is named, too: `tools is invalid: a list (web_search)`.
    """
    named = TYPE_IN_MESSAGE.search(message)
    api_type = f" ({named[1]})" if named is not None and named[1] in KNOWN_TYPES else ""
    place = ".".join(part if part.isdigit() or part in _known_names() else "…" for part in param.split("."))
    return f"{place[:MAX_ECHO_CHARACTERS]} is invalid{f': {json_type}' if json_type else ''}{api_type}"


@cache
def _known_names() -> frozenset[str]:
    """Return the names of all fields of requests: other keys are the client's, and not logged."""
    models, names = [BaseModel], {"body"}
    while models:
        models += (model := models.pop()).__subclasses__()
        names.update(model.model_fields, getattr(model, "neutral", ()))
        names.update(field.alias for field in model.model_fields.values() if field.alias)
    return frozenset(names)


def json_type(value: object) -> str:
    """Return the type of a JSON value, in JSON's words."""
    return next(name for kind, name in JSON_TYPES.items() if isinstance(value, kind))


def _refuse(
    request: Request, status: int, body: Json, headers: Mapping[str, str] | None = None, logged: str | None = None
) -> JSONResponse:
    """`logged` replaces the message in the log."""
    log.info("refused %s status=%d: %s", request.url.path, status, logged or body["error"]["message"])
    return JSONResponse(error_answer(request.url.path, status, body["error"], current_request_id()), status, headers)


def shown(value: object) -> str:
    """Shorten a bad value for an error, in ASCII: any other text might not be valid UTF-8."""
    return ascii(value[:MAX_ECHO_CHARACTERS] if isinstance(value, str) else value)[:MAX_ECHO_CHARACTERS]


def _body(message: str, kind: str, param: str | None, code: str | None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusals(*statuses: int, form: type[BaseModel] = Refusal) -> dict[int | str, Json]:
    """Describe a route's error answers, in a form of `error_forms`."""
    return {status: {"model": form, "description": DESCRIPTIONS[status]} for status in statuses}


DESCRIPTIONS = {
    400: "The request is invalid; the message names the field and both numbers",
    401: "An API key is needed",
    404: "Not found, or no model of this name",
    413: "The body is too large",
    415: "The content type is not JSON",
    429: "A limit of the API key is reached; Retry-After has the seconds to wait",
    500: "The server failed; the message names the request's id",
    501: "The server's engine does not support this",
    503: "The queue is full, or the server stops; Retry-After has the seconds to wait",
    504: "The request's deadline passed",
}
BODY_STATUSES = (400, 401, 404, 413, 415, 429, 500, 503, 504)
BODY_REFUSALS = refusals(*BODY_STATUSES)
ANTHROPIC_BODY_REFUSALS = refusals(*BODY_STATUSES, form=AnthropicRefusal)
OLLAMA_BODY_REFUSALS = refusals(*BODY_STATUSES, form=OllamaRefusal)

EVENT = {  # of a stream: `data` is JSON, or [DONE] at the end
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
EVENTS: Json = {"text/event-stream": {"schema": EVENT}}


def generated(
    *fields: str, refused: dict[int | str, Json] = BODY_REFUSALS, streamed: Json = EVENTS
) -> dict[int | str, Json]:
    """Describe the answers of a route that generates: an object with these fields, a stream, or an error.

    `streamed` is the content of a stream, server-sent events by default.
    """
    content = {"application/json": {"schema": {"type": "object", "required": list(fields)}}, **streamed}
    return {200: {"description": "The answer; as events if `stream` is true", "content": content}, **refused}


def _describe_no_422(app: FastAPI) -> None:
    """Remove status 422, which FastAPI adds to every route, from the description: this server never answers with it."""
    described = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            for path in described()["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]

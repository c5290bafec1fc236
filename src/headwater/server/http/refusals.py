"""What /openapi.json says of answers: those that generate, and refusals."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's description says of the errors it may answer with."""
    return {status: {"model": Refusal, "description": DESCRIPTIONS[status]} for status in statuses}


DESCRIPTIONS = {
    400: "The request cannot be served as it is; the message names the field and both numbers",
    401: "An API key is needed",
    404: "There is no such thing here",
    413: "The body is too large",
    415: "The body is no JSON by its content type",
    500: "The server failed; the message names the request's id",
    501: "The server's engine cannot do this",
    503: "The queue is full, or the server stops; Retry-After says when to come back",
    504: "The request's deadline passed",
}
OF_A_BODY = refusals(400, 401, 413, 415, 500, 503, 504)

EVENT = {  # of a stream: `data` is JSON, or [DONE] at the end
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def generated(*fields: str) -> dict[int | str, dict[str, Any]]:
    """Of a route that generates: an object with these fields, or server-sent events, or a refusal."""
    whole = {"type": "object", "required": list(fields)}
    content = {"application/json": {"schema": whole}, "text/event-stream": {"schema": EVENT}}
    return {200: {"description": "The answer; as events if `stream` is true", "content": content}, **OF_A_BODY}


def install(app: FastAPI) -> None:
    """Leave out of the description what FastAPI puts in by itself: 422, with which nothing is answered here."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path in described()["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]

"""How refusals look in the API's own description."""

from __future__ import annotations

from typing import Any

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
    422: "Not used: what cannot be validated is answered with 400",
    500: "The server failed; the message names the request's id",
    503: "The queue is full, or the server stops; Retry-After says when to come back",
    504: "The request's deadline passed",
}
REFUSALS = refusals(400, 401, 413, 415, 500, 503, 504)

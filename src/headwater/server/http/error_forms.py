"""Forms of errors: OpenAI's, and those of the other APIs for the paths below theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

Json = dict[str, Any]

# Anthropic's type of an error, by HTTP status
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TOO_LONG = "prompt is too long: "  # Claude Code compacts a conversation when it reads this


def anthropic_form(status: int, error: Json, request_id: str | None) -> Json:
    """Return an error as Anthropic writes it, with its code in `details`, and with `param`."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    long = error["code"] == "context_length_exceeded"
    shaped: Json = {"type": kind, "message": (TOO_LONG if long else "") + error["message"], "param": error["param"]}
    if error["code"] is not None:
        shaped["details"] = {"error_code": error["code"]}
    return {"type": "error", "error": shaped, "request_id": request_id}


def openai_form(status: int, error: Json, request_id: str | None) -> Json:
    return {"error": error}


def ollama_form(status: int, error: Json, request_id: str | None) -> Json:
    """Return an error as Ollama writes it: a sentence, which begins with the field if it does not name it."""
    message, param = error["message"], error["param"]
    return {"error": message if param is None or param in message else f"{param}: {message}"}


FORMS: dict[str, Callable[[int, Json, str | None], Json]] = {"/v1/messages": anthropic_form, "/api": ollama_form}


def error_answer(path: str, status: int, error: Json, request_id: str | None) -> Json:
    """Return the body for an error's message, type, param and code, in the form of the API at this path."""
    form = next((form for prefix, form in FORMS.items() if f"{path}/".startswith(f"{prefix}/")), openai_form)
    return form(status, error, request_id)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


class ErrorCode(BaseModel):
    error_code: str


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    param: str | None
    details: ErrorCode | None = None


class AnthropicRefusal(BaseModel):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OllamaRefusal(BaseModel):
    """Ollama's form of an error."""

    error: str

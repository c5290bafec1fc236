"""Spans of OpenTelemetry for generative AI."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, takewhile
from typing import Any

from headwater.traces.reader import has, instant
from headwater.traces.request import Usage
from headwater.traces.request_logs import Logged, RequestLogs
from headwater.traces.tokens import Tokens
from headwater.traces.usage import part_text

VALUES = ("stringValue", "intValue", "doubleValue", "boolValue")
COUNTS = ("input_tokens", "cache_read.input_tokens", "output_tokens")  # of gen_ai.usage
PROMPT, COMPLETION = "gen_ai.prompt", "gen_ai.completion"  # OpenLLMetry's names, with a number and a field after them


class GenAiSpans(RequestLogs):
    """OTLP in JSON, as the collector's file exporter writes it (`resourceSpans`), or a span a line (`attributes`).

    `gen_ai.input.messages` and `gen_ai.output.messages` [{`role`, `parts`}], `gen_ai.system_instructions`,
    `gen_ai.conversation.id`, `gen_ai.usage.input_tokens`, `.output_tokens`, `.cache_read.input_tokens`; also
    OpenLLMetry's `gen_ai.prompt.0.role` and so on.
    Source: opentelemetry.io/docs/specs/semconv/gen-ai (status: development).
    Inferred: spans without messages (content is not captured by default, and other operations have none) are left out.
    """

    about = "OpenTelemetry: OTLP JSON with gen_ai.* and messages"
    fields = ("resourceSpans", "attributes", "name", "context", "start_time", "traceId", "spanId")

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._empty = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "resourceSpans") or has(first, "attributes", "name")

    def logged(self, line: Any) -> Iterable[Logged]:
        for span in _spans(line):
            values = _attributes(span["attributes"])
            messages = _messages(values, "gen_ai.input.messages", PROMPT)
            if not messages:
                self._empty += 1
                continue
            system = part_text(_parsed(values.get("gen_ai.system_instructions", "")))
            before = [{"role": "system", "content": system}] if system else []
            answers = _messages(values, "gen_ai.output.messages", COMPLETION)
            session = values.get("gen_ai.conversation.id")
            answer = answers[0]["content"] if answers else None
            asked = {"messages": [*before, *messages]}
            yield Logged(asked, answer, None if session is None else str(session), _start(span), _usage(values))

    def notes(self) -> tuple[str, ...]:
        left = [f"{self._empty:,} spans without messages are left out"] if self._empty else []
        return (*super().notes(), *left)


def _spans(line: Any) -> Iterator[Mapping[str, Any]]:
    if "resourceSpans" not in line:
        yield line
        return
    for resource in line["resourceSpans"]:
        for scope in resource.get("scopeSpans") or ():
            yield from scope.get("spans") or ()


def _attributes(given: Any) -> dict[str, Any]:
    """Return attributes by name: an object, or OTLP's list of keys and typed values."""
    if isinstance(given, dict):
        return given
    return {one["key"]: _value(one["value"]) for one in given}


def _value(value: Mapping[str, Any]) -> Any:
    if "arrayValue" in value:
        return [_value(one) for one in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return {one["key"]: _value(one["value"]) for one in value["kvlistValue"].get("values") or ()}
    return next((value[name] for name in VALUES if name in value), None)


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _messages(values: Mapping[str, Any], name: str, numbered: str) -> list[dict[str, str]]:
    if name in values:
        parts = ((one["role"], one.get("parts", one.get("content"))) for one in _parsed(values[name]))
        return [{"role": str(role), "content": part_text(content)} for role, content in parts]
    numbers = takewhile(lambda number: f"{numbered}.{number}.role" in values, count())
    fields = ([values.get(f"{numbered}.{number}.{field}") for field in ("role", "content")] for number in numbers)
    return [{"role": str(role), "content": str(content or "")} for role, content in fields]


def _usage(values: Mapping[str, Any]) -> Usage | None:
    counts = [values.get(f"gen_ai.usage.{name}") for name in COUNTS]
    prompt, cached, output = (None if value is None else int(value) for value in counts)
    return None if prompt is None else Usage(prompt, cached, output or 0)


def _start(span: Mapping[str, Any]) -> float | None:
    if span.get("startTimeUnixNano"):
        return int(span["startTimeUnixNano"]) / 1e9
    return instant(span["start_time"]) if span.get("start_time") else None

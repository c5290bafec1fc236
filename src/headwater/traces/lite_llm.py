"""Logs of LiteLLM: its standard payload, and rows of its spend logs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.traces.reader import finite, has, instant
from headwater.traces.request_logs import Logged, RequestLogs
from headwater.traces.usage import usage_of


class LiteLlm(RequestLogs):
    """A request a line: `call_type`, `messages`, `response`, `startTime`, `prompt_tokens`, `completion_tokens`.

    `trace_id` of the standard payload, or `session_id` of spend logs, links the calls of one session. `startTime` is in
    seconds, or a date and time. Calls of a router keep their `usage` in `response`.
    Source: docs.litellm.ai/docs/proxy/logging_spec (StandardLoggingPayload).
    Inferred: failed calls (`status` \"failure\") were not answered; calls without messages are an error.
    """

    about = "standard payloads and spend logs"
    fields = ("id", "trace_id", "call_type", "messages", "response", "startTime", "prompt_tokens", "completion_tokens")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "messages", "startTime") or has(first, "messages", "call_type")

    def logged(self, line: Any) -> Iterable[Logged]:
        start, session = line.get("startTime"), line.get("session_id") or line.get("trace_id")
        at = instant(start) if isinstance(start, str) else None if start is None else finite(start, "startTime")
        usage = usage_of(line)
        answer = None if line.get("status") == "failure" else line.get("response")
        inner = answer.get("usage") if isinstance(answer, dict) else None
        asked = {"messages": line["messages"]}
        yield Logged(asked, answer or None, None if session is None else str(session), at, usage_of(inner) or usage)

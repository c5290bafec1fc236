"""OpenAI's batch files: the requests of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.traces.reader import has
from headwater.traces.request_logs import Logged, RequestLogs, messages_of


class OpenAiBatch(RequestLogs):
    """A request a line: `custom_id`, `method`, `url`, `body` for the chat, completions or responses API.

    The batch's output file has only answers and is refused. A line may have its `response`, too, as after a join by
    `custom_id`.
    Source: platform.openai.com/docs/guides/batch. Inferred: no times; each line is a request by itself.
    """

    about = "input of the batch API: custom_id, body"
    fields = ("custom_id", "method", "url", "body")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "custom_id", "body")

    def logged(self, line: Any) -> Iterable[Logged]:
        yield Logged(messages_of(line["body"]), line.get("response"))

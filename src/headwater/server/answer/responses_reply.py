"""Chat completions worded as OpenAI's Responses, whole or as its stream of typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from headwater.server.answer.reply import Reply, one_line
from headwater.server.answer.responses_output import Output
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import Events
from headwater.server.requests.responses import ResponsesRequest

Json = dict[str, Any]


class ResponsesReply:
    """The answer to one request."""

    def __init__(self, body: ResponsesRequest, model: str, chat: Reply) -> None:
        self._chat = chat
        self._output = Output()
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": model, **repeated(body)}
        self._events = 0

    async def whole(self, events: Events) -> Json:
        answer = await self._chat.whole(events)
        choice = answer["choices"][0]
        for event in (*self._output.take(choice["message"]), *self._output.end(status(choice["finish_reason"]))):
            assert event  # a whole answer has no use for what tells of its making
        return self._response(choice["finish_reason"], answer)

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """One that fails midway ends with an error event. Usage is always told."""
        finish, chunk = "stop", {}
        try:
            yield self._sse("response.created", response=self._unfinished())
            yield self._sse("response.in_progress", response=self._unfinished())
            async for chunk in self._chat.chunks(events, include_usage=True):
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    for event in self._output.take(choice["delta"]):
                        yield self._sse(**event)
            for event in self._output.end(status(finish)):
                yield self._sse(**event)
            yield self._sse(f"response.{status(finish)}", response=self._response(finish, chunk))
        except Exception as error:  # the status line is gone: this is the only place left to say it
            told = error_body(error)[1]["error"]
            plain = {name: told[name] for name in ("code", "message", "param")}
            yield self._sse("error", **plain, error=told)  # clients raise what `error` holds

    def _unfinished(self) -> Json:
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def _response(self, finish: str, answer: Json) -> Json:
        """`answer`: a chat completion, or the last chunk of one, which tells the usage."""
        ended = {"status": status(finish), "output": self._output.items, "usage": usage(answer["usage"])}
        if finish == "length":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**self._head, **ended, "headwater": answer["headwater"]}

    def _sse(self, type: str, **fields: Any) -> str:
        event = {"type": type, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {type}\ndata: {one_line(event)}\n\n"


def status(finish: str) -> str:
    return "incomplete" if finish == "length" else "completed"


def repeated(body: ResponsesRequest) -> Json:
    """What a response says again of its request. Nothing is stored, whatever OpenAI's default is."""
    given = ("instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "top_p", "user")
    return {
        **{name: getattr(body, name) for name in given},
        "metadata": body.metadata or {},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": body.text or {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "error": None,
        "incomplete_details": None,
    }


def usage(chat: Json) -> Json:
    details = chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": chat["total_tokens"],
    }

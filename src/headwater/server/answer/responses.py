"""Reply of OpenAI's Responses API: output items, whole or as a stream of typed events."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from headwater.events import FinishedEvent
from headwater.server.answer.formats.parser import CallBegin, Content, Delta, Reasoning, joined
from headwater.server.answer.forms import Json, Parser, deltas_of, new_call_id
from headwater.server.answer.reply import comment, one_line
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import EVENTS_TYPE, Events, Prefilled
from headwater.server.requests.items import INPUT, Named
from headwater.server.requests.responses import ResponsesRequest

ID_PREFIXES = {
    "reasoning": "rs_", "message": "msg_",
    "function_call": "fc_", "custom_tool_call": "ctc_", "tool_search_call": "tsc_",
}  # fmt: skip
PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}
WARNING_KEY, MAX_WARNING_CHARACTERS = "headwater_warning", 512  # in a reply's metadata
ITEM_ORDER = (Reasoning, Content)  # of a whole answer's items, before its calls

# JSON of the function that stands for a free-form tool
HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
HEX = "[0-9a-fA-F]"
UNIT, HIGH, LOW = f"{HEX}{{4}}", f"[dD][89abAB]{HEX}{{2}}", f"[dD][c-fC-F]{HEX}{{2}}"  # UTF-16, and halves of a pair
NO_UNIT = f"u{HEX}{{0,3}}(?!{HEX})."  # after a backslash that is a character
# Characters and whole escapes of a JSON string, up to its end or to an escape that more text may complete.
CHARACTERS = re.compile(
    "|".join((
        r'(?:[^"\\]',
        r"\\[^u]",
        rf"\\u{HIGH}\\u{LOW}",
        rf"\\u{HIGH}(?=[^\\]|\\[^u]|\\u(?!{LOW}){UNIT}|\\{NO_UNIT})",
        rf"\\u(?!{HIGH}){UNIT}",
        rf"\\(?={NO_UNIT}))*",
    )),
    re.DOTALL,
)  # fmt: skip
ESCAPE = re.compile(rf"\\(?:u({UNIT})|(.))", re.DOTALL)
ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class ResponsesReply:
    """Answer to one request, from the events of its only generation."""

    media_type = EVENTS_TYPE

    def __init__(self, body: ResponsesRequest, model: str, parser: Parser) -> None:
        self._parser = parser
        self._output = Output(body.call_items)
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": model, **repeated(body)}
        self._events = 0

    async def whole(self, events: Events) -> Json:
        """Return the answer when the generation has ended; raises its error if it failed."""
        deltas: list[Delta] = []
        async for _, event in events:
            deltas += deltas_of(self._parser, event)
        assert isinstance(event, FinishedEvent)
        deltas.sort(key=lambda delta: ITEM_ORDER.index(type(delta)) if type(delta) in ITEM_ORDER else len(ITEM_ORDER))
        for _ in (*self._output.take(joined(deltas)), *self._output.end(status(event))):
            pass  # only a stream sends the events of the items
        return self._response(event)

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events; a failure midway ends them with an error event. Usage is always included."""
        try:
            yield self._sse("response.created", response=self._unfinished())
            yield self._sse("response.in_progress", response=self._unfinished())
            async for _, event in events:
                for item_event in self._output.take(joined(deltas_of(self._parser, event))):
                    yield self._sse(**item_event)
            assert isinstance(event, FinishedEvent)
            for item_event in self._output.end(status(event)):
                yield self._sse(**item_event)
            yield self._sse(f"response.{status(event)}", response=self._response(event))
        except Exception as error:  # the status was sent already, so the error can only be sent as an event
            sent = error_body(error)[1]["error"]
            plain = {name: sent[name] for name in ("code", "message", "param")}
            yield self._sse("error", **plain, error=sent)  # clients raise the value of `error`

    def keep_alive(self, progress: Prefilled) -> str:
        """Return a text for a waiting client."""
        return comment(progress)

    def _unfinished(self) -> Json:
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def _response(self, end: FinishedEvent) -> Json:
        ended = {"status": status(end), "output": self._output.items, "usage": usage(end)}
        if end.finish_reason == "length":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**self._head, **ended, "headwater": end.account.as_dict()}

    def _sse(self, type: str, **fields: Any) -> str:
        event = {"type": type, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {type}\ndata: {one_line(event)}\n\n"


def status(end: FinishedEvent) -> str:
    return "incomplete" if end.finish_reason == "length" else "completed"


def usage(end: FinishedEvent) -> Json:
    account = end.account
    return {
        "input_tokens": account.prompt_tokens,
        "input_tokens_details": {"cached_tokens": account.cached_tokens},
        "output_tokens": end.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": account.prompt_tokens + end.output_tokens,
    }


def repeated(body: ResponsesRequest) -> Json:
    """Return the fields of the request that a response repeats. Nothing is stored, whatever OpenAI's default is."""
    given = ("instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "top_p", "user")
    return {
        **{name: getattr(body, name) for name in given},
        "metadata": {
            **(body.metadata or {}),
            **({WARNING_KEY: "; ".join(warnings)[:MAX_WARNING_CHARACTERS]} if (warnings := body.warnings) else {}),
        },
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


class Output:
    """Output items in the order in which the model writes them. At most the last one is open."""

    def __init__(self, calls: Mapping[str, Named] | None = None) -> None:
        """`calls`: types and names of calls as the client knows them, by the model's names, if they differ."""
        self._calls = calls or {}
        self.items: list[Json] = []  # complete items
        self._open: Item | None = None
        self._kind: str | None = None  # of the open item

    def take(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        """Add deltas to the items, and yield the events of that."""
        for delta in deltas:
            if isinstance(delta, CallBegin):
                named = self._calls.get(delta.name, {"type": "function_call", "name": delta.name})
                kind = str(named["type"])
                yield from self._begin(kind, CALLS[kind](delta.id or new_call_id(), named))
                continue
            if isinstance(delta, Reasoning | Content):
                kind = "reasoning" if isinstance(delta, Reasoning) else "message"
                if kind != self._kind:
                    yield from self._begin(kind, TextItem(kind))
            assert self._open is not None
            yield from map(self._placed, self._open.add(delta.text))

    def end(self, status: str) -> Iterator[Json]:
        """Close the last item; an empty answer has an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message", TextItem("message"))
        yield from self._close(status)

    def _begin(self, kind: str, item: Item) -> Iterator[Json]:
        yield from self._close("completed")
        self._kind, self._open = kind, item
        yield self._placed({"type": "response.output_item.added", "item": item.shown("in_progress")})
        yield from map(self._placed, item.begin())

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        yield from map(self._placed, self._open.end())
        shown = self._open.shown(status)
        yield self._placed({"type": "response.output_item.done", "item": shown})
        self.items.append(shown)
        self._open = self._kind = None

    def _placed(self, event: Json) -> Json:
        return {**event, "output_index": len(self.items)}


class TextItem:
    """Reasoning or a message: an item with one part of text."""

    def __init__(self, kind: str) -> None:
        self.id, self.text = ID_PREFIXES[kind] + uuid.uuid4().hex, ""
        self._kind, self._part = kind, PART_TYPES[kind]
        self._logprobs: Json = {"logprobs": []} if kind == "message" else {}

    def shown(self, status: str) -> Json:
        """Return the item as a response shows it."""
        content = [] if status == "in_progress" else [self._shown_part()]
        own: Json = {"role": "assistant"} if self._kind == "message" else {"summary": []}
        return {"id": self.id, "type": self._kind, "status": status, "content": content, **own}

    def begin(self) -> list[Json]:
        """Return the events after the item's own."""
        return [self._event("response.content_part.added", part=self._shown_part())]

    def add(self, text: str) -> list[Json]:
        """Append text, and return the events of that."""
        self.text += text
        return [self._event(f"response.{self._part}.delta", delta=text, **self._logprobs)]

    def end(self) -> list[Json]:
        """Return the events before the item's last."""
        done = self._event(f"response.{self._part}.done", text=self.text, **self._logprobs)
        return [done, self._event("response.content_part.done", part=self._shown_part())]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0, **fields}

    def _shown_part(self) -> Json:
        own: Json = {"annotations": []} if self._kind == "message" else {}
        return {"type": self._part, "text": self.text, **own, **self._logprobs}


class CallItem:
    """Call of a function."""

    def __init__(self, call_id: str, named: Named) -> None:
        """`named`: its type, and its name as the client knows it."""
        self.id, self.arguments = ID_PREFIXES[named["type"]] + uuid.uuid4().hex, ""
        self._named = {"call_id": call_id, **named}

    def shown(self, status: str) -> Json:
        return {"id": self.id, "status": status, "arguments": self.arguments, **self._named}

    def begin(self) -> list[Json]:
        return []

    def add(self, text: str) -> list[Json]:
        self.arguments += text
        return [{"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": text}]

    def end(self) -> list[Json]:
        done = {"type": "response.function_call_arguments.done", "item_id": self.id}
        return [{**done, "name": self._named["name"], "arguments": self.arguments}]


class FreeFormCallItem(CallItem):
    """Call of a free-form tool."""

    def __init__(self, call_id: str, named: Named) -> None:
        super().__init__(call_id, named)
        self._decoder, self._input = FreeFormText(), ""

    def shown(self, status: str) -> Json:
        return {"id": self.id, "status": status, "input": self._input, **self._named}

    def add(self, text: str) -> list[Json]:
        return self._added(self._decoder.push(text))

    def end(self) -> list[Json]:
        last = self._added(self._decoder.finish())
        return [*last, {"type": "response.custom_tool_call_input.done", "item_id": self.id, "input": self._input}]

    def _added(self, text: str) -> list[Json]:
        self._input += text
        delta = {"type": "response.custom_tool_call_input.delta", "item_id": self.id, "delta": text}
        return [delta] if text else []


class SearchCallItem(CallItem):
    """Call of the client's search for tools, which no event shows in pieces."""

    def shown(self, status: str) -> Json:
        named = {name: value for name, value in self._named.items() if name != "name"}
        arguments = object_of(self.arguments) if self.arguments else {}
        return {"id": self.id, "status": status, "execution": "client", "arguments": arguments, **named}

    def add(self, text: str) -> list[Json]:
        super().add(text)
        return []

    def end(self) -> list[Json]:
        return []


Item = TextItem | CallItem
CALLS: dict[str, type[CallItem]] = {
    "function_call": CallItem,
    "custom_tool_call": FreeFormCallItem,
    "tool_search_call": SearchCallItem,
}


def object_of(arguments: str) -> Any:
    """Decode the arguments of a call; those of a call that was cut off stay as they are."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class FreeFormText:
    """Decoder of a call's arguments, in pieces. The text does not depend on how they are cut.

    Arguments of another form than the function's become text at their end: the one text among them, or their JSON.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """Return the text that the next piece adds."""
        if self._ended:
            return ""
        self._unread += arguments
        if not self._begun:
            if (head := HEAD.match(self._unread)) is None:
                return ""
            self._begun, self._unread = True, self._unread[head.end() :]
        found = CHARACTERS.match(self._unread)
        assert found is not None  # of no characters, too
        self._unread = self._unread[found.end() :]
        self._ended = self._unread.startswith('"')
        return unescaped(found[0])

    def finish(self) -> str:
        """Return the rest of the text, when the arguments have ended. An escape that was cut off is dropped."""
        return "" if self._begun else other_text(self._unread)


def unescaped(text: str) -> str:
    """Decode the inside of a JSON string. An unknown escape stays, half of a surrogate pair becomes U+FFFD."""
    decoded = ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else ESCAPED.get(found[2], found[0]), text)
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def other_text(arguments: str) -> str:
    """Return the text that arguments of another form hold."""
    try:
        value: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    texts = [value[INPUT]] if INPUT in value else list(value.values())
    if not texts:
        return ""
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments

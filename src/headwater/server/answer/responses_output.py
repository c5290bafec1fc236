"""The output items of a response, built from a chat completion's deltas, with the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

Json = dict[str, Any]


class Item(Protocol):
    """One output item while it is written."""

    def shown(self, status: str) -> Json: ...

    def begin(self) -> list[Json]: ...

    def add(self, text: str) -> Json: ...

    def end(self) -> list[Json]: ...


class TextItem:
    """Reasoning, or a message: an item with one part of text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.text = ""
        self.id = ID_PREFIXES[kind] + uuid.uuid4().hex
        self._part = PART_TYPES[kind]

    def shown(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._shown_part(self.text)]
        own = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self.id, "type": self.kind, "status": status, "content": content, **own}

    def begin(self) -> list[Json]:
        return [self._event("response.content_part.added", part=self._shown_part(""))]

    def add(self, text: str) -> Json:
        self.text += text
        return self._event(f"response.{self._part}.delta", delta=text, **self._logprobs())

    def end(self) -> list[Json]:
        done = self._event(f"response.{self._part}.done", text=self.text, **self._logprobs())
        return [done, self._event("response.content_part.done", part=self._shown_part(self.text))]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0, **fields}

    def _shown_part(self, text: str) -> Json:
        own = {"annotations": []} if self.kind == "message" else {}
        return {"type": self._part, "text": text, **own, **self._logprobs()}

    def _logprobs(self) -> Json:
        return {"logprobs": []} if self.kind == "message" else {}


class CallItem:
    """A call of a function."""

    def __init__(self, call_id: str, name: str) -> None:
        self.arguments = ""
        self.id = ID_PREFIXES["function_call"] + uuid.uuid4().hex
        self._named = {"call_id": call_id, "name": name}

    def shown(self, status: str) -> Json:
        return {"id": self.id, "type": "function_call", "status": status, "arguments": self.arguments, **self._named}

    def begin(self) -> list[Json]:
        return []

    def add(self, text: str) -> Json:
        self.arguments += text
        return {"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": text}

    def end(self) -> list[Json]:
        done = {"type": "response.function_call_arguments.done", "item_id": self.id}
        return [{**done, "name": self._named["name"], "arguments": self.arguments}]


ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}
TEXT_FIELDS = {"reasoning_content": "reasoning", "content": "message"}  # of a delta, and the item they belong to


class Output:
    """Items in the order in which a model writes them. At most the last one is open."""

    def __init__(self) -> None:
        self.items: list[Json] = []  # that are complete
        self._open: Item | None = None
        self._key: object = None  # what the open item is: "reasoning", "message", or the number of a call

    def take(self, delta: Json) -> Iterator[Json]:
        """The events that a chat delta, or a whole message, comes to."""
        for field, kind in TEXT_FIELDS.items():
            if delta.get(field):
                yield from self._write(kind, partial(TextItem, kind), delta[field])
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function = call["function"]
            new = partial(CallItem, call.get("id", ""), function.get("name", ""))  # later deltas of a call tell neither
            yield from self._write(call.get("index", number), new, function.get("arguments") or "")

    def end(self, status: str) -> Iterator[Json]:
        """Close the last item; an answer of nothing has an empty message."""
        if self._open is None and not self.items:
            yield from self._begin("message", TextItem("message"))
        yield from self._close(status)

    def _write(self, key: object, new: Callable[[], Item], text: str) -> Iterator[Json]:
        if key != self._key:
            yield from self._close("completed")
            yield from self._begin(key, new())
        assert self._open is not None
        if text:
            yield self._placed(self._open.add(text))

    def _begin(self, key: object, item: Item) -> Iterator[Json]:
        self._key, self._open = key, item
        yield self._placed({"type": "response.output_item.added", "item": item.shown("in_progress")})
        yield from map(self._placed, item.begin())

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        yield from map(self._placed, self._open.end())
        shown = self._open.shown(status)
        yield self._placed({"type": "response.output_item.done", "item": shown})
        self.items.append(shown)
        self._open = self._key = None

    def _placed(self, event: Json) -> Json:
        return {**event, "output_index": len(self.items)}

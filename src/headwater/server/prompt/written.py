"""Calls as the model wrote them, which later prompts repeat: a template would write their values in its own way.

A template prints `true` as `True`, for instance, so the next turn's prompt would leave the generated text at the first
such value, and the cache would miss from there on.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.server.prompt.segments import NONCE
from headwater.server.requests.messages import Conversation
from headwater.server.requests.normal_form import Message, mapping

MAX_ANSWERS = 4_096  # whose calls are kept
MAX_CHARACTERS = 16_000_000  # of them together


@dataclass(frozen=True, slots=True)
class Call:
    """Call as a client knows it. `arguments` is the JSON text that it got."""

    id: str
    name: str
    arguments: str


class WrittenCalls:
    """Texts of the calls of answers, the last ones of each namespace together. Thread safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Hashable, str] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def add(self, namespace: str, calls: Sequence[Call], text: str) -> None:
        """Keep the text in which the model wrote the calls of an answer, with the white space before them."""
        decoded = [(call.id, call.name, mapping(call.arguments)) for call in calls]
        with self._lock:
            for key in (_key(namespace, decoded, with_ids=with_ids) for with_ids in (True, False)):
                self._characters += len(text) - len(self._texts.pop(key, ""))
                self._texts[key] = text
            while len(self._texts) > 2 * MAX_ANSWERS or self._characters > 2 * MAX_CHARACTERS:
                self._characters -= len(self._texts.popitem(last=False)[1])

    def find(self, namespace: str, message: Message) -> str | None:
        """Return the text of a message's calls if the model wrote exactly these; None if it is not known."""
        sent = message.get("tool_calls") or []
        calls = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in sent]
        with_ids = all(isinstance(id_, str) for id_, *_ in calls)
        key = _key(namespace, calls, with_ids=with_ids)
        with self._lock:
            if not calls or key not in self._texts:
                return None
            self._texts.move_to_end(key)
            return self._texts[key]


def _key(namespace: str, calls: Sequence[tuple[str | None, str, Any]], with_ids: bool) -> Hashable:
    """Return a key of calls: those of some clients come back without their ids."""
    return namespace, tuple(
        (id_ if with_ids else None, name, json.dumps(arguments, sort_keys=True)) for id_, name, arguments in calls
    )


@dataclass(frozen=True, slots=True)
class CallForm:
    """Texts before and after the name of a call without arguments, as a template writes it."""

    before: str
    after: str


def stand_in(number: int) -> str:
    """Return a name that no tool has, for the calls of message `number`."""
    return f"{NONCE}w{number}w"


def with_stand_ins(conversation: Conversation) -> Conversation:
    """Replace the calls whose texts are known by one call each, whose place in the rendered text can be found."""
    messages = list(conversation.messages)
    for number in conversation.written:
        call = {"id": "call", "type": "function", "function": {"name": stand_in(number), "arguments": {}}}
        messages[number] = {**messages[number], "tool_calls": [call]}
    return replace(conversation, messages=tuple(messages))


def spliced(text: str, conversation: Conversation, form: CallForm) -> str | None:
    """Put the known texts in the places of their stand-ins; None if a stand-in is not written in this form."""
    for number, written in conversation.written.items():
        before, marker, after = text.partition(f"{form.before}{stand_in(number)}{form.after}")
        if marker:
            kept = before.rstrip() if conversation.messages[number]["content"].strip() else before
            text = f"{kept}{written}{after}"
    return None if re.search(re.escape(NONCE) + "w", text) else text

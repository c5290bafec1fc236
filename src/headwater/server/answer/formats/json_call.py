"""One call as a JSON object: its name, and its arguments, passed on as they come."""

from __future__ import annotations

import json
import re
from typing import Any

from headwater.server.answer.formats.delta import CallArguments, CallBegin, Delta
from headwater.server.answer.formats.json_end import JsonEnd
from headwater.server.answer.formats.schema import decoded

# a call whose arguments can be passed on as they come
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


class JsonCall:
    """Text in from the object's first brace on, however it is cut.

    A name and arguments in this order are passed on as they come; anything else is looked at when it is whole.
    """

    def __init__(self) -> None:
        self._text = ""
        self._whole = JsonEnd()  # of the object
        self._arguments: JsonEnd | None = None  # while they come
        self.begun = False  # it is a call

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        """Deltas, and what follows the object, None for "none yet"; all of it if the object turns out to be no call."""
        self._text += text
        out: list[Delta] = []
        if not self.begun and not self._head(out):
            return self._other(text)
        if self._arguments is not None:
            self._pass_on(out, self._arguments)
        if self._arguments is not None:
            return out, None
        self._text = self._text.lstrip(" \t\r\n}")  # braces too many are dropped
        return out, self._text or None

    def finish(self) -> tuple[list[Delta], str]:
        """What was held back."""
        if self.begun:
            return [], ""
        call = whole_call(self._text)
        return (call, "") if call else ([], self._text)

    def _head(self, out: list[Delta]) -> bool:
        """Find the call's name, if arguments follow that can be passed on."""
        found = HEAD.match(self._text)
        name = found and _decoded(found[1])
        if found is None or not isinstance(name, str):
            return False
        out.append(CallBegin(name))
        self.begun, self._arguments, self._text = True, JsonEnd(), self._text[found.end() :]
        return True

    def _other(self, text: str) -> tuple[list[Delta], str | None]:
        """An object that is no call yet, `text` its last piece."""
        end = self._whole.push(text)
        if end is None:
            return [], None
        end += len(self._text) - len(text)
        call = whole_call(self._text[:end])
        self.begun = bool(call)
        return call, self._text[end:] if call else self._text

    def _pass_on(self, out: list[Delta], arguments: JsonEnd) -> None:
        end = arguments.push(self._text)
        out.append(CallArguments(self._text[:end]))
        if end is not None:
            self._text, self._arguments = self._text[end:], None
        else:
            self._text = ""


def whole_call(text: str) -> list[Delta]:
    """The call that is written in a whole text; nothing if there is none."""
    call = _decoded(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return []
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return []
    return [CallBegin(call["name"]), CallArguments(json.dumps(arguments, ensure_ascii=False))]


def _decoded(text: str) -> Any:
    """The value of a JSON text, None where it is none."""
    try:
        return decoded(text)
    except ValueError:
        return None

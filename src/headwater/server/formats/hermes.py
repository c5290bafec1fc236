"""Calls as JSON between <tool_call> tags, as Hermes, Qwen3 and Qwen3-Next write them."""

from __future__ import annotations

import json
import re
from typing import Any

from headwater.server.formats.delta import CallArguments, CallBegin, Content, Delta
from headwater.server.formats.grammar import Grammar, literal
from headwater.server.formats.schema import decoded
from headwater.server.formats.tags import may_become
from headwater.server.formats.tools import CallParser, Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# a call whose arguments can be passed on as they come
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
OUTSIDE = re.compile(r'["{}\[\]<]')  # what matters in JSON outside of a string; "<" is never there
INSIDE = re.compile(r'["\\]')  # and inside of one


class Hermes:
    open, close = OPEN, CLOSE

    def told_by(self, template: str) -> bool:
        return OPEN in template and '"arguments"' in template.replace("\\", "")

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return HermesCall(raw)

    def rule(self, grammar: Grammar, tool: Tool) -> str:
        head = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        arguments = grammar.json(tool.parameters, spaced=True)
        return grammar.rule(f"{literal(head)} {arguments} {literal('}' + chr(10))} {grammar.tag(CLOSE)}")


class HermesCall:
    """A name and arguments in this order are passed on as they come; anything else is looked at when it is whole."""

    def __init__(self, raw: str) -> None:
        self._raw = raw
        self._text = ""
        self._looked = 0  # no closing tag begins before here
        self._arguments: JsonEnd | None = None  # while they come
        self._begun = False

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        self._text += text
        out: list[Delta] = []
        if not self._begun:
            rest = self._head(out)
            if not self._begun or rest is not None:
                return out, rest
        if self._arguments is not None:
            self._pass_on(out, self._arguments)
        return out, None if self._arguments is not None else self._tail()

    def finish(self) -> tuple[list[Delta], str]:
        if self._begun:
            return [], ""  # at most a part of the closing tag is left
        call = whole_call(self._text)
        return (call, "") if call else ([Content(self._raw)], self._text)

    def _head(self, out: list[Delta]) -> str | None:
        """Find the call's name; gives what is not the call's, if that is known."""
        begun = self._text.lstrip()
        if not begun:
            return None
        end = self._text.find(CLOSE, self._looked)
        self._looked = max(0, len(self._text) - len(CLOSE) + 1)
        found = HEAD.match(self._text, 0, len(self._text) if end < 0 else end)
        name = found and _decoded(found[1])
        if found and isinstance(name, str):
            out.append(CallBegin(name))
            self._begun, self._arguments, self._text = True, JsonEnd(), self._text[found.end() :]
            return None
        if end < 0 and begun[0] == "{" and not found:
            return None
        call = whole_call(self._text[:end]) if end >= 0 and not found else None
        out += call or [Content(self._raw)]
        return self._text[end + len(CLOSE) :] if call else self._text

    def _pass_on(self, out: list[Delta], arguments: JsonEnd) -> None:
        end = arguments.push(self._text)
        out.append(CallArguments(self._text[:end]))
        if end is not None:
            self._text, self._arguments = self._text[end:], None
        else:
            self._text = ""

    def _tail(self) -> str | None:
        """What follows the closing tag, or whatever stands in its place; braces too many are dropped."""
        after = self._text.lstrip(" \t\r\n}")
        if not after or may_become(after, CLOSE):
            return None
        return after.removeprefix(CLOSE)


class JsonEnd:
    """Finds where an object ends that comes in pieces: after its last brace, or before a "<" outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> int | None:
        """Where in this piece the object ends; None if it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while found := (INSIDE if self._quoted else OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "<":
                    return found.start()
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None


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

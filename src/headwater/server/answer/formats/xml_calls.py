"""Tool calls in tags, one for each parameter. Values are written bare; the tool's schema gives their types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.server.answer.formats.grammar import (
    Grammar,
    either,
    encoded,
    literal,
    properties_of,
    property_schema,
    resolved,
    types_of,
)
from headwater.server.answer.formats.parser import (
    CallArguments,
    CallBegin,
    CallParser,
    Delta,
    ToolFormat,
    may_become,
    possible_start,
)
from headwater.server.requests.tools import FunctionDefinition, Tools

NOT_IN_NAMES = re.compile(r"[<\n]")
STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class XmlCalls(ToolFormat):
    """Calls of a family that writes them in tags."""

    function: tuple[str, str, str]  # text before and after a call's name, and after the call
    parameter: tuple[str, str, str]  # likewise of a parameter
    line: str  # text before and after a value: a line end, or nothing

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return XmlSection(self, raw, tools)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Build a call with keys in the schema's order. For bare strings only the choices of an enum are enforced."""
        schema = resolved(tool.arguments, tool.arguments)
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        begin, named, end = self.parameter
        end = f"{self.line}{end}\n"
        parts = []
        for key, own in properties_of(tool.arguments).items():
            value = _value(grammar, tool.arguments, own, end)
            part = f"{literal(f'{begin}{key}{named}{self.line}')} {value}"
            parts.append(part if key in required else f"({part})?")
        if not parts and schema.get("additionalProperties", True):
            parts = [f"({literal(begin)} /[A-Za-z0-9_.-]+/ {literal(named + self.line)} {grammar.until(end)})*"]
        before, after, last = self.function
        return " ".join([literal(f"{before}{tool.name}{after}\n"), *parts, literal(f"{last}\n")])


# <tool_call>
# <function=name>
# <parameter=key>
# value
# </parameter>
# </function>
# </tool_call>
# Qwen3-Coder, Qwen3.5 and Nemotron 3.
FUNCTION, KEY = ("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>")
QWEN_XML = XmlCalls("<tool_call>", "</tool_call>", "\n", None, "", ("<function=", "<parameter="), FUNCTION, KEY, "\n")

# <minimax:tool_call>
# <invoke name="name">
# <parameter name="key">value</parameter>
# </invoke>
# </minimax:tool_call>
# MiniMax-M2 (its chat template; llama.cpp's models/templates has Unsloth's version).
INVOKE, NAMED = ('<invoke name="', '">', "</invoke>"), ('<parameter name="', '">', "</parameter>")
MARKS = ('<invoke name="', '<parameter name="')
MINIMAX_XML = XmlCalls("<minimax:tool_call>", "</minimax:tool_call>", "\n", "", "", MARKS, INVOKE, NAMED, "")


def _value(grammar: Grammar, root: Mapping[str, Any], schema: Any, end: str) -> str:
    """Return an expression for a bare value of this schema, and the tag that ends it."""
    plain = resolved(schema, root)
    choices = plain.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"{either([literal(choice) for choice in choices])} {literal(end)}"
    if "string" in types_of(plain, root):
        return grammar.until(end)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{grammar.json({**shared, **plain})} {literal(end)}"


class XmlSection(CallParser):
    """Parser of all calls after one opening tag; a call that is cut off stays incomplete.

    Strings are passed on as they come, other values when they are complete.
    """

    def __init__(self, tags: XmlCalls, raw: str, tools: Tools) -> None:
        super().__init__(raw, self._head)
        self._tags = tags
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._types = STRING  # of the open parameter
        self._first = True  # no parameter of the call has come

    def finish(self) -> tuple[list[Delta], str]:
        if self._step == self._string:
            return [CallArguments(_escaped(self._text))], ""
        return ([CallArguments(self._text)], "") if self._step == self._other else super().finish()

    def _head(self, out: list[Delta]) -> bool:
        before, after, _ = self._tags.function
        begun = self._text.lstrip()
        if may_become(begun, before):
            return False
        name = _named(begun, before, after)
        if name is None:
            return False
        if not name.strip():
            return self._leave(out, self._text)
        tool = self._tools.get(name.strip())
        self._schema = tool.arguments if tool else {}
        out += [CallBegin(name.strip()), CallArguments("{")]
        self.begun = self._first = True
        return self._then(begun[len(before) + len(name) + len(after) :], self._between)

    def _between(self, out: list[Delta]) -> bool:
        last, close, (before, after, _) = self._tags.function[2], self._tags.close, self._tags.parameter
        self._text = self._text.lstrip()
        if may_become(self._text, before, last, close):
            return False
        if self._text.startswith((last, close)):
            out.append(CallArguments("}"))
            return self._then(self._text.removeprefix(last), self._close)
        name = _named(self._text, before, after)
        if name:
            key = json.dumps(name.strip(), ensure_ascii=False)
            out.append(CallArguments(f"{'' if self._first else ', '}{key}: "))
            self._types = types_of(property_schema(self._schema, name.strip()), self._schema)
            self._first = False
            rest = self._text[len(before) + len(name) + len(after) :]
            return self._then(rest, self._quote if self._types == STRING else self._other)
        if name == "":
            self.rest = self._text  # the arguments stay incomplete, so that no client acts on half of them
        return False

    def _quote(self, out: list[Delta]) -> bool:
        if may_become(self._text, self._tags.parameter[2]):
            return False
        out.append(CallArguments('"'))
        return self._then(self._text.removeprefix(self._tags.line), self._string)

    def _string(self, out: list[Delta]) -> bool:
        line, last = self._tags.line, self._tags.parameter[2]
        end = self._text.find(last)
        value = self._take(possible_start(self._text, line + last, last) if end < 0 else end)
        out.append(CallArguments(_escaped(value.removesuffix(line) if end >= 0 else value)))
        return end >= 0 and self._ended(out, '"')

    def _other(self, out: list[Delta]) -> bool:
        line, end = self._tags.line, self._text.find(self._tags.parameter[2])
        if end < 0:
            return False
        value = self._take(end).removeprefix(line).removesuffix(line)
        return self._ended(out, encoded(value, self._types))

    def _ended(self, out: list[Delta], last: str) -> bool:
        """Return the end of a value, whose closing tag is next."""
        out.append(CallArguments(last))
        return self._then(self._text.removeprefix(self._tags.parameter[2]), self._between)

    def _close(self, out: list[Delta]) -> bool:
        """Read the closing tag, another call if there may be several, or any text instead."""
        close, another = self._tags.close, self._tags.function[:1] if self._tags.several else ()
        after = self._text.lstrip()
        if may_become(after, close, *another):
            return False
        if after.startswith(another):
            return self._then(after, self._head)
        self.rest = after.removeprefix(close)
        return False


def _named(text: str, begin: str, end: str) -> str | None:
    """Return the name between `begin` and `end`; None if `end` may still come, "" if the text cannot be a name."""
    if not text.startswith(begin):
        return ""
    text = text.removeprefix(begin)
    at, wrong = text.find(end), NOT_IN_NAMES.search(text)
    if wrong is not None and not 0 <= at < wrong.start():
        return ""
    return text[:at] if at >= 0 else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

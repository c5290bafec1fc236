"""Tool calls in tags, one for each parameter. Values are written bare; the tool's schema gives their types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.server.answer.formats.delta import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    may_become,
    possible_start,
)
from headwater.server.answer.formats.grammar import (
    Grammar,
    either,
    encoded,
    literal,
    property_schema,
    resolved,
    types_of,
)
from headwater.server.answer.formats.parser import CallParser
from headwater.server.requests.tools import FunctionDefinition, Tools

NOT_OF_A_NAME = re.compile(r"[<\n]")
STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Format of a family."""

    open: str
    close: str
    function: tuple[str, str]  # text before and after a call's name
    function_end: str
    parameter: tuple[str, str]  # text before and after a parameter's name
    parameter_end: str
    line: str  # text before and after a value: a line end, or nothing
    several: bool  # several calls may stand between one pair of tags

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.open, self.close)

    def used_by(self, template: str) -> bool:
        plain = template.replace("\\", "")
        return all(mark in plain for mark in (self.open, self.function[0], self.parameter[0]))

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return XmlSection(self, raw, tools)

    def rule(self, grammar: Grammar, tools: Sequence[FunctionDefinition], one: bool) -> str:
        call = grammar.rule(either([self._call(grammar, tool) for tool in tools]))
        more = f"{call}*" if self.several and not one else ""
        return grammar.rule(f"{literal(chr(10))} {call} {more} {grammar.tag(self.close)}")

    def _call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Build a call with keys in the schema's order. For bare strings only the choices of an enum are enforced."""
        schema = resolved(tool.arguments, tool.arguments)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        (begin, named), end = self.parameter, f"{self.line}{self.parameter_end}\n"
        parts = []
        for key in properties:
            value = _value(grammar, tool.arguments, properties[key], end)
            part = f"{literal(f'{begin}{key}{named}{self.line}')} {value}"
            parts.append(part if key in required else f"({part})?")
        if not parts and schema.get("additionalProperties", True):
            parts = [f"({literal(begin)} /[A-Za-z0-9_.-]+/ {literal(named + self.line)} {grammar.until(end)})*"]
        head, tail = f"{tool.name.join(self.function)}\n", f"{self.function_end}\n"
        return " ".join([literal(head), *parts, literal(tail)])


# <tool_call>
# <function=name>
# <parameter=key>
# value
# </parameter>
# </function>
# </tool_call>
# Qwen3-Coder, Qwen3.5 and Nemotron 3.
QWEN_XML = XmlCalls(
    open="<tool_call>",
    close="</tool_call>",
    function=("<function=", ">"),
    function_end="</function>",
    parameter=("<parameter=", ">"),
    parameter_end="</parameter>",
    line="\n",
    several=False,
)

# <minimax:tool_call>
# <invoke name="name">
# <parameter name="key">value</parameter>
# </invoke>
# </minimax:tool_call>
# MiniMax-M2 (its chat template; llama.cpp's models/templates has Unsloth's version).
MINIMAX_XML = XmlCalls(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    function=('<invoke name="', '">'),
    function_end="</invoke>",
    parameter=('<parameter name="', '">'),
    parameter_end="</parameter>",
    line="",
    several=True,
)


def _value(grammar: Grammar, root: Mapping[str, Any], schema: Any, end: str) -> str:
    """Return an expression for a bare value of this schema, and the tag that ends it."""
    plain = resolved(schema, root)
    choices = plain.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"{either([literal(choice) for choice in choices])} {literal(end)}"
    if "string" in types_of(plain, root):
        return grammar.until(end)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{grammar.json({**shared, **plain}, spaced=True)} {literal(end)}"


class XmlSection(CallParser):
    """Parser of all calls after one opening tag; a call that is cut off stays incomplete.

    Strings are passed on as they come, other values when they are complete.
    """

    def __init__(self, tags: XmlCalls, raw: str, tools: Tools) -> None:
        super().__init__(raw, self._function)
        self._tags = tags
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._types = STRING  # of the open parameter
        self._first = True  # no parameter of the call has come
        self._opened = False  # the open string's first quote was returned

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back."""
        if self._step == self._function:
            return ([] if self._begun else [Content(self._raw)]), self._text
        if self._step == self._string and self._opened:
            return [CallArguments(_escaped(self._text))], ""
        return ([CallArguments(self._text)], "") if self._step == self._other else ([], "")

    def _function(self, out: list[Delta]) -> bool:
        before, after = self._tags.function
        begun = self._text.lstrip()
        if not begun or may_become(begun, before):
            return False
        name = _named(begun[len(before) :], after) if begun.startswith(before) else ""
        if name is None:
            return False
        if not name.strip():
            return self._leave(out, self._text)
        tool = self._tools.get(name.strip())
        self._schema = tool.arguments if tool else {}
        out += [CallBegin(name.strip()), CallArguments("{")]
        self._begun = self._first = True
        self._text, self._step = begun[len(before) + len(name) + len(after) :], self._between
        return True

    def _between(self, out: list[Delta]) -> bool:
        tags, (before, after) = self._tags, self._tags.parameter
        self._text = self._text.lstrip()
        if not self._text or any(may_become(self._text, tag) for tag in (before, tags.function_end, tags.close)):
            return False
        if self._text.startswith((tags.function_end, tags.close)):
            out.append(CallArguments("}"))
            self._text, self._step = self._text.removeprefix(tags.function_end), self._close
            return True
        name = _named(self._text[len(before) :], after) if self._text.startswith(before) else ""
        if name:
            self._parameter(out, name.strip())
            self._text = self._text[len(before) + len(name) + len(after) :]
        elif name == "":
            self._rest = self._text  # the arguments stay incomplete, so that no client acts on half of them
        return bool(name)

    def _parameter(self, out: list[Delta], key: str) -> None:
        out.append(CallArguments(f"{'' if self._first else ', '}{json.dumps(key, ensure_ascii=False)}: "))
        self._types = types_of(property_schema(self._schema, key), self._schema)
        self._first = self._opened = False
        self._step = self._string if self._types == STRING else self._other

    def _string(self, out: list[Delta]) -> bool:
        if not self._opened:
            if not self._text or may_become(self._text, self._tags.parameter_end):
                return False
            self._text = self._text.removeprefix(self._tags.line)
            self._opened = True
            out.append(CallArguments('"'))
        line, last = self._tags.line, self._tags.parameter_end
        end = self._text.find(last)
        shown = possible_start(self._text, line + last, last) if end < 0 else end
        value, self._text = self._text[:shown], self._text[shown:]
        out.append(CallArguments(_escaped(value.removesuffix(line) if end >= 0 else value)))
        if end < 0:
            return False
        out.append(CallArguments('"'))
        self._text, self._step = self._text[len(last) :], self._between
        return True

    def _other(self, out: list[Delta]) -> bool:
        line, last = self._tags.line, self._tags.parameter_end
        end = self._text.find(last)
        if end < 0:
            return False
        value = self._text[:end].removeprefix(line).removesuffix(line)
        out.append(CallArguments(encoded(value, self._types)))
        self._text, self._step = self._text[end + len(last) :], self._between
        return True

    def _close(self, out: list[Delta]) -> bool:
        """Read the closing tag, another call if there may be several, or any text in its place."""
        close, function = self._tags.close, self._tags.function[0]
        after = self._text.lstrip()
        if not after or may_become(after, close) or (self._tags.several and may_become(after, function)):
            return False
        if self._tags.several and after.startswith(function):
            self._text, self._step = after, self._function
            return True
        self._rest = after.removeprefix(close)
        return False


def _named(text: str, end: str) -> str | None:
    """Return the name before `end`; None if `end` may still come, "" if the text cannot be a name."""
    at, wrong = text.find(end), NOT_OF_A_NAME.search(text)
    if wrong is not None and not 0 <= at < wrong.start():
        return ""
    return text[:at] if at >= 0 else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""Calls in tags, one a parameter, as Qwen3-Coder and Qwen3.5 write them.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>

Values stand there bare; the tool's schema says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.server.formats.delta import CallArguments, CallBegin, Content, Delta
from headwater.server.formats.grammar import Grammar, either, literal
from headwater.server.formats.schema import encoded, property_schema, resolved, types_of
from headwater.server.formats.tags import may_become, possible_start
from headwater.server.formats.tools import CallParser, Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"([^<>\n]+)>")
NO_NAME = re.compile(r"[<\n]|\A>")
STRING = frozenset({"string"})


class QwenXml:
    open, close = OPEN, CLOSE
    tags = (OPEN, CLOSE)
    several = False

    def told_by(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return QwenXmlCall(raw, tools)

    def rule(self, grammar: Grammar, tools: Sequence[Tool], one: bool) -> str:
        return either([self._call(grammar, tool) for tool in tools])

    def _call(self, grammar: Grammar, tool: Tool) -> str:
        """Keys come in the schema's order. Of bare strings only the choices of an enum are enforced."""
        schema = resolved(tool.parameters, tool.parameters)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for key in properties:
            part = f"{literal(f'{PARAMETER}{key}>{chr(10)}')} {_value(grammar, tool.parameters, properties[key])}"
            parts.append(part if key in required else f"({part})?")
        if not parts and schema.get("additionalProperties", True):
            parts = [f"({literal(PARAMETER)} /[A-Za-z0-9_.-]+/ {literal('>' + chr(10))} {grammar.until(END)})*"]
        head, tail = f"\n{FUNCTION}{tool.name}>\n", f"{FUNCTION_END}\n"
        return grammar.rule(" ".join([literal(head), *parts, literal(tail), grammar.tag(CLOSE)]))


END = f"\n{PARAMETER_END}\n"


def _value(grammar: Grammar, root: Mapping[str, Any], schema: Any) -> str:
    """An expression for a bare value of this schema, and the tag that ends it."""
    plain = resolved(schema, root)
    choices = plain.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"{either([literal(choice) for choice in choices])} {literal(END)}"
    if "string" in types_of(plain, root):
        return grammar.until(END)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{grammar.json({**shared, **plain}, spaced=True)} {literal(END)}"


class QwenXmlCall:
    """Strings are passed on as they come, other values when they are whole. A call that ends early stays cut off."""

    def __init__(self, raw: str, tools: Tools) -> None:
        self._raw = raw
        self._tools = tools
        self._text = ""
        self._schema: Mapping[str, Any] = {}
        self._types = STRING  # of the open parameter
        self._first = True  # no parameter has come
        self._opened = False  # the open string's first quote is out
        self._step: Callable[[list[Delta]], bool] = self._function
        self._rest: str | None = None

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        self._text += text
        out: list[Delta] = []
        while self._rest is None and self._step(out):
            pass
        return out, self._rest

    def finish(self) -> tuple[list[Delta], str]:
        if self._step == self._function:
            return [Content(self._raw)], self._text
        if self._step == self._string and self._opened:
            return [CallArguments(_escaped(self._text))], ""
        return ([CallArguments(self._text)], "") if self._step == self._other else ([], "")

    # Each step reads one thing from the text; it gives False where it needs more.

    def _function(self, out: list[Delta]) -> bool:
        begun = self._text.lstrip()
        if not begun or may_become(begun, FUNCTION):
            return False
        after = begun.removeprefix(FUNCTION)
        name = NAME.match(after)
        if begun.startswith(FUNCTION) and not name and not NO_NAME.search(after):
            return False
        if not begun.startswith(FUNCTION) or not name or not name[1].strip():
            out.append(Content(self._raw))
            self._rest = self._text
            return False
        tool = self._tools.get(name[1].strip())
        self._schema = tool.parameters if tool else {}
        out += [CallBegin(name[1].strip()), CallArguments("{")]
        self._text, self._step = after[name.end() :], self._between
        return True

    def _between(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip()
        if not self._text or any(may_become(self._text, tag) for tag in (PARAMETER, FUNCTION_END, CLOSE)):
            return False
        if self._text.startswith((FUNCTION_END, CLOSE)):
            out.append(CallArguments("}"))
            self._text, self._step = self._text.removeprefix(FUNCTION_END), self._close
            return True
        after = self._text.removeprefix(PARAMETER)
        name = NAME.match(after)
        if self._text.startswith(PARAMETER) and name:
            self._parameter(out, name[1].strip())
            self._text = after[name.end() :]
            return True
        if not self._text.startswith(PARAMETER) or NO_NAME.search(after):
            self._rest = self._text  # the arguments stay without their end: nobody should act on half of them
        return False

    def _parameter(self, out: list[Delta], key: str) -> None:
        out.append(CallArguments(f"{'' if self._first else ', '}{json.dumps(key, ensure_ascii=False)}: "))
        self._types = types_of(property_schema(self._schema, key), self._schema)
        self._first = self._opened = False
        self._step = self._string if self._types == STRING else self._other

    def _string(self, out: list[Delta]) -> bool:
        if not self._opened:
            if not self._text or may_become(self._text, PARAMETER_END):
                return False
            self._text = self._text.removeprefix("\n")
            self._opened = True
            out.append(CallArguments('"'))
        end = self._text.find(PARAMETER_END)
        shown = possible_start(self._text, "\n" + PARAMETER_END, PARAMETER_END) if end < 0 else end
        value, self._text = self._text[:shown], self._text[shown:]
        out.append(CallArguments(_escaped(value.removesuffix("\n") if end >= 0 else value)))
        if end < 0:
            return False
        out.append(CallArguments('"'))
        self._text, self._step = self._text[len(PARAMETER_END) :], self._between
        return True

    def _other(self, out: list[Delta]) -> bool:
        end = self._text.find(PARAMETER_END)
        if end < 0:
            return False
        value = self._text[:end].removeprefix("\n").removesuffix("\n")
        out.append(CallArguments(encoded(value, self._types)))
        self._text, self._step = self._text[end + len(PARAMETER_END) :], self._between
        return True

    def _close(self, out: list[Delta]) -> bool:
        after = self._text.lstrip()
        if after and not may_become(after, CLOSE):
            self._rest = after.removeprefix(CLOSE)
        return False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

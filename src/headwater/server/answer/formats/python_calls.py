"""Tool calls in the syntax of Python, as LFM2 writes them. The values of arguments become JSON.

A string ends with its quote if the next argument or the end of the call follows: chat templates print strings without
escapes, so models write quotes within strings, too.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from headwater.server.answer.formats.grammar import (
    Grammar,
    decoded,
    either,
    literal,
    properties_of,
    property_schema,
    resolved,
    types_of,
)
from headwater.server.answer.formats.json_calls import SPACE, JsonSection
from headwater.server.answer.formats.parser import CallArguments, CallBegin, CallParser, Delta, ToolFormat, may_become
from headwater.server.requests.tools import FunctionDefinition, Tools

NAME = r"[^\s()\[\]{},=<\"']+"
HEAD, KEY = re.compile(rf"({NAME})\s*\("), re.compile(rf"({NAME})\s*=\s*(?=\S)")
HEAD_BEGUN, KEY_BEGUN = re.compile(rf"{NAME}\s*\Z"), re.compile(rf"{NAME}\s*(?:=\s*)?\Z")
AFTER_STRING = re.compile(rf"\s*(?:,\s*{NAME}\s*=|(?:,\s*)?\)\s*[,\]<])")  # what follows a string's last quote
AFTER_STRING_BEGUN = re.compile(rf"\s*(?:,\s*(?:{NAME}\s*)?|(?:,\s*)?\)\s*)?\Z")
SPECIAL = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}  # signs that matter within a string
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([^uUx]))", re.DOTALL)
ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?)?\Z")
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {sign: sign for sign in "\\\"'/"}
WORDS = {"True": "boolean", "False": "boolean", "None": "null"}  # by the JSON type that they are written for
BRACKETS = re.compile(r"[()\[\]{},\"']")


@dataclass(frozen=True, slots=True)
class PythonCalls(ToolFormat):
    """Calls of functions with keyword arguments, in a list."""

    def used_by(self, template: str) -> bool:
        """Return whether a chat template has any of the marks: some templates of this format print no calls."""
        return any(mark in template for mark in (self.open, *self.marks))

    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        return PythonSection(raw, self.close)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Build a call with keys in the schema's order."""
        schema, properties = resolved(tool.arguments, tool.arguments), properties_of(tool.arguments)
        required = schema.get("required")
        first = more = literal(")")  # the rest of a call, before its first argument and after one
        if not properties and schema.get("additionalProperties", True):
            argument = grammar.rule(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {self._value(grammar, tool, {})}')
            first = grammar.rule(f'({argument} (", " {argument})*)? ")"')
        for key in reversed(list(properties)):
            value = f"{literal(f'{key}=')} {self._value(grammar, tool, property_schema(tool.arguments, key))} {more}"
            optional = key not in (required if isinstance(required, list) else ())
            first = grammar.rule(either([value, *([first] if optional else [])]))
            more = grammar.rule(either([f'", " {value}', *([more] if optional else [])]))
        return f"{literal(f'{tool.name}(')} {first}"

    def _value(self, grammar: Grammar, tool: FunctionDefinition, schema: Any) -> str:
        """Return an expression for a JSON text that fits a schema, or a word of Python's that stands for one."""
        root, plain = tool.arguments, resolved(schema, tool.arguments)
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        types = frozenset[str]() if {"enum", "const"} & set(plain) else types_of(plain, root)
        words = [literal(word) for word, of in WORDS.items() if of in types]
        return either([grammar.json({**shared, **plain}, tool.strict), *words])

    def unwritable(self, tool: FunctionDefinition) -> str | None:
        keys = enumerate(properties_of(tool.arguments), 1)
        return next((f"the name of property {number}" for number, key in keys if not re.fullmatch(NAME, key)), None)


# <|tool_call_start|>[weather(city="Bonn", days=3), ping()]<|tool_call_end|>
# LFM2 and LFM2.5 (docs.liquid.ai, "Tool use"; the chat template of LFM2.5-8B-A1B). LFM2's template prints no calls: it
# has the marks of lists of tools. Asked to, the models write a list of JSON objects between the tags.
PYTHON = PythonCalls(
    "<|tool_call_start|>", "<|tool_call_end|>", "[", ", ", "]", ("<|tool_list_start|>", "List of tools: ")
)


class PythonSection(CallParser):
    """Parser of calls after the opening tag. Strings are passed on as they come, other values when complete."""

    def __init__(self, raw: str, close: str) -> None:
        super().__init__(raw, self._first)
        self._close = close
        self._json: JsonSection | None = None  # reads calls that are JSON objects
        self._argued = False  # an argument of the call has come
        self._quote = ""  # of the string that is being read
        self._value = ValueEnd()

    def finish(self) -> tuple[list[Delta], str]:
        if self._json is not None:
            return self._json.finish()
        if self._step not in (self._string, self._other):
            return super().finish()
        out = list[Delta]()
        ended = re.fullmatch(rf"{self._quote}\s*(\)?)\s*", self._text) if self._step == self._string else None
        if ended is not None:
            out.append(CallArguments('"}' if ended[1] else '"'))
            self.whole += bool(ended[1])
        return out or [CallArguments(_escaped(self._text) if self._step == self._string else self._text)], ""

    def _first(self, out: list[Delta]) -> bool:
        begun = self._text.lstrip(SPACE)
        inner = begun.removeprefix("[").lstrip(SPACE)
        if not inner:
            return False
        if inner.startswith("{"):
            self._json = JsonSection(self._raw, self._close)
            return self._then(begun, self._objects)
        return self._then(inner, self._head)

    def _objects(self, out: list[Delta]) -> bool:
        assert self._json is not None
        out += self._json.push(self._take(len(self._text)))
        self.begun, self.whole, self.rest = self._json.begun, self._json.whole, self._json.rest
        return False

    def _next(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(f"{SPACE},")
        if self._text.startswith("]"):
            return self._then(self._text[1:], self._end)
        if may_become(self._text, self._close):
            return False
        return self._end(out) if self._text.startswith(self._close) else self._then(self._text, self._head)

    def _head(self, out: list[Delta]) -> bool:
        found = HEAD.match(self._text)
        if found is None:
            return not HEAD_BEGUN.match(self._text) and self._leave(out, self._text)
        out += [CallBegin(found[1]), CallArguments("{")]
        self.begun, self._argued = True, False
        return self._then(self._text[found.end() :], self._argument)

    def _argument(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(f"{SPACE}," if self._argued else SPACE)
        if self._text.startswith(")"):
            out.append(CallArguments("}"))
            self.whole += 1
            return self._then(self._text[1:], self._next)
        found = KEY.match(self._text)
        if found is None:
            if self._text and not KEY_BEGUN.match(self._text):
                self.rest = self._text  # the arguments stay incomplete, so that no client acts on half of them
            return False
        quoted = self._text[found.end()] in SPECIAL
        before, mark = ", " if self._argued else "", '"' if quoted else ""
        out.append(CallArguments(f"{before}{json.dumps(found[1], ensure_ascii=False)}: {mark}"))
        self._argued, self._value = True, ValueEnd()
        self._quote = self._text[found.end()] if quoted else ""
        return self._then(self._text[found.end() + quoted :], self._string if quoted else self._other)

    def _string(self, out: list[Delta]) -> bool:
        special = SPECIAL[self._quote].search(self._text)
        out.append(CallArguments(_escaped(self._take(len(self._text) if special is None else special.start()))))
        if special is None:
            return False
        if special[0] == "\\":
            return self._escape(out)
        if AFTER_STRING.match(self._text, 1):
            out.append(CallArguments('"'))
            return self._then(self._text[1:], self._argument)
        if AFTER_STRING_BEGUN.match(self._text, 1):
            return False
        out.append(CallArguments(_escaped(self._take(1))))
        return True

    def _escape(self, out: list[Delta]) -> bool:
        """Read an escape. One that has no meaning stays as it is; half a pair of surrogates stays escaped."""
        if ESCAPE_BEGUN.match(self._text):
            return False
        found = ESCAPE.match(self._text)
        text = self._take(1 if found is None else found.end())
        if found is None or found[4]:
            out.append(CallArguments(_escaped(ESCAPED.get(found[4], text) if found else text)))
        elif found[1]:
            out.append(CallArguments(text))
        else:
            code = int(found[2] or found[3], 16)
            is_sign = code < 0xD800 or 0xE000 <= code < 0x110000
            out.append(CallArguments(_escaped(chr(code) if is_sign else text)))
        return True

    def _other(self, out: list[Delta]) -> bool:
        end = self._value.find(self._text)
        if end is None:
            return False
        out.append(CallArguments(as_json(self._take(end))))
        return self._then(self._text, self._argument)

    def _end(self, out: list[Delta]) -> bool:
        """Read the closing tag, or any text instead."""
        text = self._text.lstrip(SPACE)
        if not may_become(text, self._close):
            self.rest = text.removeprefix(self._close)
        elif self._step != self._end:
            self._step = self._end
        return False


class ValueEnd:
    """Finder of the end of a value in pieces of text: a comma or bracket outside of its own brackets and strings."""

    def __init__(self) -> None:
        self._depth, self._at = 0, 0
        self._quote = ""

    def find(self, text: str) -> int | None:
        """Continue with a longer text; return the position at which the value ends, or None if it continues."""
        while self._at < len(text):
            if self._quote:
                found = SPECIAL[self._quote].search(text, self._at)
                if found is not None and found[0] == "\\" and found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = len(text) if found is None else found.end() + (found[0] == "\\")
                self._quote = "" if found is not None and found[0] == self._quote else self._quote
                continue
            found = BRACKETS.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            if self._depth == 0 and found[0] in ",)]}":
                return found.start()
            self._at = found.end()
            self._quote = found[0] if found[0] in SPECIAL else ""
            self._depth += (found[0] in "([{") - (found[0] in ")]}")
        return None


def as_json(text: str) -> str:
    """Return a value of Python as a JSON text; text that is no value becomes a string."""
    bare = text.strip()
    try:
        decoded(bare)
    except ValueError:
        try:
            return json.dumps(ast.literal_eval(bare), allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(bare, ensure_ascii=False)
    return bare


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

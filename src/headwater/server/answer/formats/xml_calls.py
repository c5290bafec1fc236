"""Tool calls in tags, one for each parameter. Values are written bare; the tool's schema gives their types.

Parser and grammar share one rule for the end of a value. A value ends with its closing tag, if another tag of the call
follows. If the closing tag is missing, the value ends before the next parameter or the end of the call. All other text
is part of the value, tags too. In a call on lines, as templates write it, an end has a line end, which no JSON text has
within a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
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
)
from headwater.server.requests.structured import quoted
from headwater.server.requests.tools import FunctionDefinition, Tools

SPACE, LINE_END = r"[ \t\r\n]*", r"[ \t\r]*\n[ \t\r\n]*"  # regular expressions
NOT_IN_NAMES = re.compile(r"[<\n]")
STRING = frozenset({"string"})
ANY_KEY = r"[^<>\n]+"


@dataclass(frozen=True, slots=True)
class ValueEnds:
    """Regular expressions of the ends."""

    whole: re.Pattern[str]  # an end, up to the tag that follows
    begun: re.Pattern[str]  # the beginning of an end, at the end of a text
    last: re.Pattern[str]  # a closing tag at the end of an answer

    def safe(self, text: str, at: int = 0) -> int:
        """Return the position from which the text may be the beginning of an end."""
        begun = self.begun.search(text, at)
        return len(text) if begun is None else begun.start()


@lru_cache(maxsize=1024)
def value_ends(tags: XmlCalls, later: tuple[str, ...] | None, lined: bool) -> ValueEnds:
    """Return the ends of a parameter's value.

    `later`: the parameters that come after it in the tool's schema; None: the tool has none, so any key may come.
    `lined`: the call is written on lines.
    """
    end, last, begin = map(re.escape, (tags.parameter[2], tags.function[2], tags.parameter[0]))
    parts = [_beginning(tag) for tag in (*tags.parameter[::2], tags.function[2], tags.close)]
    parts += [rf"{last}{SPACE}(?:{_beginning(tags.close)})?", rf"{begin}[^\n]*"]
    return ValueEnds(
        re.compile("|".join(f"{before}(?={after})" for before, after in _ends(tags, later, lined, re.escape))),
        re.compile(rf"(?:\n(?:{end}{SPACE})?|{end}{SPACE})?(?:{'|'.join(parts)})?\Z"),
        re.compile(rf"\n?{end}{SPACE}\Z"),
    )


def unreadable(tags: XmlCalls, quote: Callable[[str], str] = quoted) -> str:
    """Return a regular expression, by default llguidance's, for what cannot stand in a value of a call on lines.

    That is an end and the tag that follows, whatever the keys: one expression for all parameters of all tools, since
    each costs the compiler a seventh of what it may use.
    """
    return "|".join(before + after for before, after in _ends(tags, None, True, quote))


def _ends(
    tags: XmlCalls, later: tuple[str, ...] | None, lined: bool, quote: Callable[[str], str]
) -> list[tuple[str, str]]:
    """Return expressions for the ends, each with one for what follows."""
    begin, named, end, last, close, line = map(quote, (*tags.parameter, tags.function[2], tags.close, tags.line))
    follows = f"({begin}|{last}|{close})"
    if not lined:
        return [(rf"\n?{end}{SPACE}", follows), (rf"\n?({end}{SPACE})?", f"{last}{SPACE}{close}")]
    key = ANY_KEY if later is None else "|".join(map(quote, later))
    return [
        (rf"\n{end}{SPACE}", follows),
        (rf"{end}{LINE_END}", follows),
        (rf"\n?({end}{SPACE})?", f"{last}{LINE_END}{close}"),
        *([(r"\n", f"{begin}({key}){named}{line}")] if key else []),
    ]


def _beginning(tag: str) -> str:
    """Return a regular expression for the beginnings of a tag."""
    return "".join(f"{re.escape(sign)}(?:" for sign in tag[:-1]) + re.escape(tag[-1]) + ")?" * (len(tag) - 1)


@dataclass(frozen=True, slots=True)
class XmlCalls(ToolFormat):
    """Calls of a family that writes them in tags."""

    function: tuple[str, str, str]  # text before and after a call's name, and after the call
    parameter: tuple[str, str, str]  # likewise of a parameter
    line: str  # text before and after a value: a line end, or nothing

    @property
    def bare(self) -> str:
        return self.function[0]

    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        return XmlSection(self, raw, tools, tag == self.bare)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Build a call with keys in the schema's order. For bare strings only the choices of an enum are enforced."""
        schema, properties = resolved(tool.arguments, tool.arguments), properties_of(tool.arguments)
        given = schema.get("required")
        required = given if isinstance(given, list) else []
        (before, after, last), (begin, named, _) = self.function, self.parameter
        opened, closable = "", True  # the rest of a call after the start of a parameter; whether the call may end
        if not properties and schema.get("additionalProperties", True):
            key = f"/[A-Za-z0-9_.-]+/ {literal(named + self.line)}"
            more, end = (self._text(grammar, tag) for tag in (begin, last))
            opened = grammar.rule(f'({key} {more})* {key} {end} "\\n"')
        for key in reversed(list(properties)):
            value = self._value(grammar, tool, key, opened, closable)
            this = f"{literal(f'{key}{named}{self.line}')} {value}"
            closable = closable and key not in required
            opened = grammar.rule(this if key in required or not opened else either([this, opened]))
        head = literal(f"{before}{tool.name}{after}\n")
        return f"{head} {self._rest(opened, closable)}"

    def _value(self, grammar: Grammar, tool: FunctionDefinition, key: str, opened: str, closable: bool) -> str:
        """Return an expression for a parameter's bare value and the rest of the call."""
        root, schema = tool.arguments, property_schema(tool.arguments, key)
        plain, choices = resolved(schema, root), choices_of(schema, root)
        if not choices and "string" in types_of(plain, root):
            more = [f"{self._text(grammar, self.parameter[0])} {opened}"] if opened else []
            return either(more + ([f'{self._text(grammar, self.function[2])} "\\n"'] if closable else []))
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = either(list(map(literal, choices))) if choices else grammar.json({**shared, **plain}, tool.strict)
        return f"{value} {literal(self._end)} {self._rest(opened, closable)}"

    def _text(self, grammar: Grammar, tag: str) -> str:
        """Return an expression for any text that is read back as one value, its end, and the start of the next tag."""
        return grammar.value(self._end + tag, unreadable(self))

    def _rest(self, opened: str, closable: bool) -> str:
        """Return an expression for a call from a place between parameters."""
        more = [f"{literal(self.parameter[0])} {opened}"] if opened else []
        return either(more + ([literal(f"{self.function[2]}\n")] if closable else []))

    @property
    def _end(self) -> str:
        return f"{self.line}{self.parameter[2]}\n"

    def unwritable(self, tool: FunctionDefinition) -> str | None:
        properties, (before, after, _) = properties_of(tool.arguments), self.parameter
        for number, (key, schema) in enumerate(properties.items(), 1):
            if not key or key != key.strip() or _named(f"{before}{key}{after}", before, after) != key:
                return f"the name of property {number}"
            ends = value_ends(self, later_keys(tool.arguments, key), lined=True)
            if any(ends.whole.search(choice) for choice in choices_of(schema, tool.arguments)):
                return f"a value that property {number} allows"
        return None


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


def choices_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the strings from which a schema lets choose; none if it allows anything else."""
    plain = resolved(schema, root)
    choices = [plain["const"]] if "const" in plain else plain.get("enum")
    return list(choices) if isinstance(choices, list) and all(isinstance(one, str) for one in choices) else []


def later_keys(root: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """Return the parameters after this one in a tool's schema, None if the schema has none."""
    keys = tuple(properties_of(root))
    return keys[keys.index(key) + 1 :] if key in keys else () if keys else None


class XmlSection(CallParser):
    """Parser of all calls after one opening tag; a call that is cut off stays incomplete.

    Strings are passed on as they come, other values when they are complete.
    """

    def __init__(self, tags: XmlCalls, raw: str, tools: Tools, bare: bool) -> None:
        """`bare`: the tag that was read is the start of a call outside of the format's tags."""
        super().__init__(raw, self._head)
        self._text = tags.bare if bare else ""
        self._tags, self._tools, self._bare = tags, tools, bare
        self._schema: Mapping[str, Any] = {}
        self._key, self._types = "", STRING  # of the open parameter
        self._first = True  # no parameter of the call has come
        self._lined = False  # a line end stands before the call's first parameter
        self._searched = 0  # characters of the text in which no value ends

    def finish(self) -> tuple[list[Delta], str]:
        if self._step not in (self._string, self._other):
            return super().finish()
        if (end := self._ends().last.search(self._text)) is not None:
            self._value(out := list[Delta](), end)
            return out, ""
        return [CallArguments(_escaped(self._text) if self._step == self._string else self._text)], ""

    def _head(self, out: list[Delta]) -> bool:
        before, after, _ = self._tags.function
        begun = self._text.lstrip()
        if may_become(begun, before):
            return False
        name = _named(begun, before, after)
        if name is None:
            return False
        tool = self._tools.get(name.strip())
        if not name.strip() or (self._bare and (tool is None or tool.strict)):
            return self._leave(out, self._text)
        self._schema = tool.arguments if tool else {}
        out += [CallBegin(name.strip()), CallArguments("{")]
        self.begun = self._first = True
        self._lined = False
        return self._then(begun[len(before) + len(name) + len(after) :], self._between)

    def _between(self, out: list[Delta]) -> bool:
        last, close, (before, after, _) = self._tags.function[2], self._tags.close, self._tags.parameter
        text = self._text.lstrip()
        self._lined = self._lined or (self._first and "\n" in self._text[: len(self._text) - len(text)])
        self._text = text
        if may_become(self._text, before, last, close):
            return False
        if self._text.startswith((last, close)):
            out.append(CallArguments("}"))
            self.whole += 1
            return self._then(self._text.removeprefix(last), self._close)
        name = _named(self._text, before, after)
        if name:
            self._key = name.strip()
            key = json.dumps(self._key, ensure_ascii=False)
            out.append(CallArguments(f"{'' if self._first else ', '}{key}: "))
            self._types = types_of(property_schema(self._schema, self._key), self._schema)
            self._first, self._searched = False, 0
            rest = self._text[len(before) + len(name) + len(after) :]
            return self._then(rest, self._quote if self._types == STRING else self._other)
        if name == "":
            self.rest = self._text  # the arguments stay incomplete, so that no client acts on half of them
        return False

    def _quote(self, out: list[Delta]) -> bool:
        if not self._text:
            return False
        out.append(CallArguments('"'))
        return self._then(self._text.removeprefix(self._tags.line), self._string)

    def _string(self, out: list[Delta]) -> bool:
        ends = self._ends()
        end = ends.whole.search(self._text)
        if end is None:
            out.append(CallArguments(_escaped(self._take(ends.safe(self._text)))))
            return False
        return self._value(out, end)

    def _other(self, out: list[Delta]) -> bool:
        ends = self._ends()
        end = ends.whole.search(self._text, self._searched)
        if end is None:
            self._searched = ends.safe(self._text, self._searched)
            return False
        return self._value(out, end)

    def _value(self, out: list[Delta], end: re.Match[str]) -> bool:
        """Add the rest of a value that ends there."""
        line, last = self._tags.line, self._tags.parameter[2]
        own = 1 if not line and self._text.startswith("\n" + last, end.start()) else 0  # its last line end
        value = self._text[: end.start() + own]
        string = self._step == self._string
        out.append(CallArguments(_escaped(value) + '"' if string else encoded(value.removeprefix(line), self._types)))
        return self._then(self._text[end.end() :], self._between)

    def _ends(self) -> ValueEnds:
        return value_ends(self._tags, later_keys(self._schema, self._key), self._lined)

    def _close(self, out: list[Delta]) -> bool:
        """Read the closing tag, another call, or any text instead."""
        close, another = self._tags.close, self._tags.bare
        after = self._text.lstrip()
        if may_become(after, close, another):
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

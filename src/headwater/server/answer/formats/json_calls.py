"""Tool calls written as JSON objects between tags: one object, one on each line, or a list of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.server.answer.formats.delta import CallArguments, CallBegin, Content, Delta, may_become
from headwater.server.answer.formats.grammar import Grammar, decoded, either, literal
from headwater.server.answer.formats.parser import CallParser
from headwater.server.requests.tools import FunctionDefinition, Tools

SPACE = " \t\r\n"
OUTSIDE = re.compile(r'["{}\[\]<]')  # the characters that matter in JSON outside of a string, where "<" never occurs
INSIDE = re.compile(r'["\\]')  # and inside of a string
# the start of a call whose arguments can be passed on as they come
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Format of a family. The parser is more tolerant than the format: brackets, commas and lines are optional."""

    open: str
    close: str  # empty if the end of the list ends the calls
    before: str  # text between the opening tag and the first call
    between: str | None  # text between two calls; None: each call has its own tags
    after: str  # text between the last call and the closing tag
    marks: tuple[str, ...]  # texts that occur in each chat template of this format

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.open, self.close) if tag)

    @property
    def several(self) -> bool:
        return self.between is not None

    def used_by(self, template: str) -> bool:
        plain = template.replace("\\", "")
        return all(mark in plain for mark in self.marks)

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return JsonSection(raw, self.close)

    def rule(self, grammar: Grammar, tools: Sequence[FunctionDefinition], one: bool) -> str:
        call = grammar.rule(either([_call(grammar, tool) for tool in tools]))
        more = "" if one or self.between is None else f"({literal(self.between)} {call})*"
        end = grammar.tag(self.close) if self.close else ""
        return grammar.rule(f"{literal(self.before)} {call} {more} {literal(self.after)} {end}")


def _call(grammar: Grammar, tool: FunctionDefinition) -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    return f"{literal(head)} {grammar.json(tool.arguments, spaced=True)} {literal('}')}"


# <tool_call>
# {"name": "weather", "arguments": {"city": "Bonn"}}
# </tool_call>
# Hermes, Qwen3 and Qwen3-Next, Granite 4 (the chat template of ibm-granite/granite-4.0-h-*, vLLM's granite4 parser),
# Falcon-H1, Ling and Ring 2.0.
HERMES = JsonCalls("<tool_call>", "</tool_call>", "\n", None, "\n", ("<tool_call>", '"arguments"'))

# <TOOLCALL>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]</TOOLCALL>
# Nemotron-H and Nemotron-Nano v2 (the chat template of NVIDIA-Nemotron-Nano-9B-v2, also in the examples of vLLM and
# llama.cpp). Nemotron 3 writes qwen_xml.
NEMOTRON = JsonCalls("<TOOLCALL>", "</TOOLCALL>", "[", ", ", "]", ("<TOOLCALL>",))

# <tool_calls>[
#     {"name": "weather", "arguments": {"city": "Bonn"}},
#     {"name": "ping", "arguments": {}}
# ]</tool_calls>
# Jamba 1.5 and later (vLLM's jamba parser and the outputs in its tests). <|bom|> begins a message of Jamba's templates.
JAMBA = JsonCalls("<tool_calls>", "</tool_calls>", "[\n    ", ",\n    ", "\n]", ("<tool_calls>", "<|bom|>"))

# <tool_calls>
# {"name": "weather", "arguments": {"city": "Bonn"}}
# {"name": "ping", "arguments": {}}
# </tool_calls>
# MiniMax-M1 and MiniMax-Text-01 (vLLM's examples/tool_chat_template_minimax_m1.jinja).
MINIMAX = JsonCalls("<tool_calls>", "</tool_calls>", "\n", "\n", "\n", ("<tool_calls>", '"arguments"'))

# <|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]
# Granite 3 (vLLM's granite parser). Only the end of the list ends the calls. Granite 4 writes hermes.
GRANITE = JsonCalls("<|tool_call|>", "", "[", ", ", "]", ("<|tool_call|>",))


class JsonSection(CallParser):
    """Parser of all calls after one opening tag."""

    def __init__(self, raw: str, close: str) -> None:
        super().__init__(raw, self._first)
        self._close = close
        self._listed = False
        self._call: JsonCall | None = None

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back; at most a part of the closing tag is dropped."""
        out, rest = self._call.finish() if self._call is not None else ([], "")
        return (out, rest) if out or self._begun else ([Content(self._raw)], self._unread)

    def _first(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text.startswith("[") and not self._listed:
            self._text, self._listed = self._text[1:], True
            return True
        if self._text and self._text[0] != "{":
            return self._leave(out, self._unread)
        return self._enter()

    def _enter(self) -> bool:
        if not self._text:
            return False
        self._call, self._step = JsonCall(), self._within
        return True

    def _within(self, out: list[Delta]) -> bool:
        assert self._call is not None
        text, self._text = self._text, ""
        deltas, rest = self._call.push(text)
        out += deltas
        self._begun = self._begun or self._call.begun
        if rest is None:
            return False
        if not self._call.begun:
            return self._leave(out, rest)
        self._call, self._text, self._step = None, rest, self._next
        return True

    def _next(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE + ",")
        if not self._text or self._text.startswith("{"):
            return self._enter()
        if self._text.startswith("]"):
            self._text, self._step = self._text[1:], self._end
            return True
        return self._end(out)

    def _end(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE) if self._close else self._text
        if not may_become(self._text, self._close):
            self._rest = self._text.removeprefix(self._close)
        return False


class JsonCall:
    """Parser of one call, from the object's first brace on.

    If the name comes before the arguments, these are passed on as they come; any other object is parsed when complete.
    """

    def __init__(self) -> None:
        self._text = ""
        self._whole = JsonEnd()  # of the object
        self._arguments: JsonEnd | None = None  # set while arguments are passed on
        self.begun = False  # the object is a call

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        """Return deltas and the text after the object, or None before its end; all text if the object is no call."""
        self._text += text
        out: list[Delta] = []
        if not self.begun and not self._head(out):
            return self._other(text)
        if self._arguments is not None:
            self._pass_on(out, self._arguments)
        if self._arguments is not None:
            return out, None
        self._text = self._text.lstrip(" \t\r\n}")  # surplus braces are dropped
        return out, self._text or None

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back."""
        if self.begun:
            return [], ""
        call = whole_call(self._text)
        return (call, "") if call else ([], self._text)

    def _head(self, out: list[Delta]) -> bool:
        """Begin the call if its name is complete, and arguments follow that can be passed on."""
        found = HEAD.match(self._text)
        name = found and _decoded(found[1])
        if found is None or not isinstance(name, str):
            return False
        out.append(CallBegin(name))
        self.begun, self._arguments, self._text = True, JsonEnd(), self._text[found.end() :]
        return True

    def _other(self, text: str) -> tuple[list[Delta], str | None]:
        """Parse an object that has not begun a call; `text` is its last piece."""
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


class JsonEnd:
    """Finder of a JSON object's end in pieces of text: after its last brace, or before a "<" outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> int | None:
        """Return the position in this piece at which the object ends, or None if it continues."""
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
    """Parse a complete text as one call; return no delta if it is none."""
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
    """Return the value of a JSON text, or None if it is not valid JSON."""
    try:
        return decoded(text)
    except ValueError:
        return None

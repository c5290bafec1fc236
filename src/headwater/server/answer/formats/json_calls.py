"""Tool calls whose arguments are JSON objects: calls that are objects themselves, between tags, and Kimi's."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from headwater.server.answer.formats.grammar import Grammar, decoded, literal
from headwater.server.answer.formats.parser import (
    CallArguments,
    CallBegin,
    CallParser,
    Delta,
    Step,
    ToolFormat,
    may_become,
    possible_start,
)
from headwater.server.requests.tools import FunctionDefinition, Tools

SPACE = " \t\r\n"
# the characters that matter in JSON outside of a string, where "<" never occurs, and inside of one
OUTSIDE_STRING, INSIDE_STRING = re.compile(r'["{}\[\]<]'), re.compile(r'["\\]')
# the start of a call whose arguments can be passed on as they come
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"  # of Kimi
KIMI_ID = re.compile(r"(?:functions\.)?([^\s<>]+?)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class JsonCalls(ToolFormat):
    """Calls as objects, one on each line or in a list. To the parser brackets, commas and lines are optional."""

    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        return JsonSection(raw, self.close)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        return f"{literal(head)} {grammar.json(tool.arguments, tool.strict)} {literal('}')}"


@dataclass(frozen=True, slots=True)
class KimiCalls(ToolFormat):
    """Calls with an id before their arguments, delimited by tokens of their own."""

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.open, self.close, CALL, ARGUMENTS, CALL_END)

    @property
    def bare(self) -> str:
        return CALL

    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        return KimiSection(raw, self.close, tools if tag == CALL else None)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        name = f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
        arguments = grammar.json(tool.arguments, tool.strict)
        return f"{grammar.tag(CALL)} {name} {grammar.tag(ARGUMENTS)} {arguments} {grammar.tag(CALL_END)}"


# <tool_call>
# {"name": "weather", "arguments": {"city": "Bonn"}}
# </tool_call>
# Hermes, Qwen3 and Qwen3-Next, Granite 4 (the chat template of ibm-granite/granite-4.0-h-*, vLLM's granite4 parser),
# Falcon-H1, Ling and Ring 2.0.
HERMES = JsonCalls("<tool_call>", "</tool_call>", "\n", None, "\n", ('"arguments"',))

# <TOOLCALL>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]</TOOLCALL>
# Nemotron-H and Nemotron-Nano v2 (the chat template of NVIDIA-Nemotron-Nano-9B-v2, also in the examples of vLLM and
# llama.cpp). Nemotron 3 writes qwen_xml.
NEMOTRON = JsonCalls("<TOOLCALL>", "</TOOLCALL>", "[", ", ", "]", ())

# <tool_calls>[
#     {"name": "weather", "arguments": {"city": "Bonn"}},
#     {"name": "ping", "arguments": {}}
# ]</tool_calls>
# Jamba 1.5 and later (vLLM's jamba parser and the outputs in its tests). <|bom|> begins a message of Jamba's templates.
JAMBA = JsonCalls("<tool_calls>", "</tool_calls>", "[\n    ", ",\n    ", "\n]", ("<|bom|>",))

# <tool_calls>
# {"name": "weather", "arguments": {"city": "Bonn"}}
# {"name": "ping", "arguments": {}}
# </tool_calls>
# MiniMax-M1 and MiniMax-Text-01 (vLLM's examples/tool_chat_template_minimax_m1.jinja).
MINIMAX = JsonCalls("<tool_calls>", "</tool_calls>", "\n", "\n", "\n", ('"arguments"',))

# <|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "ping", "arguments": {}}]
# Granite 3 (vLLM's granite parser). Only the end of the list ends the calls. Granite 4 writes hermes.
GRANITE = JsonCalls("<|tool_call|>", "", "[", ", ", "]", ())

# <|tool_calls_section_begin|>
# <|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|>
# <|tool_calls_section_end|>
# Kimi-Linear and Kimi K2, without white space (the chat templates of moonshotai/Kimi-K2-*, SGLang's kimi_k2 detector).
# The id counts the calls of the conversation; templates repeat it, so it is passed on.
KIMI = KimiCalls("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "", "", "", ())


class JsonArguments(CallParser):
    """Base of parsers of calls after one opening tag; passes arguments on as they come."""

    call_end = ""  # tag after a call

    def __init__(self, raw: str, close: str, first: Step) -> None:
        super().__init__(raw, first)
        self._close = close
        self._json = JsonEnd()  # of the object that is being read

    def _begin(self, out: list[Delta], call: CallBegin, rest: str) -> bool:
        out.append(call)
        self.begun, self._json = True, JsonEnd()
        return self._then(rest, self._arguments)

    def _arguments(self, out: list[Delta]) -> bool:
        end = self._json.find(self._text)
        out.append(CallArguments(self._take(len(self._text) if end is None else end)))
        self.whole += self._json.closed
        return end is not None and self._then(self._text, self._call_end)

    def _call_end(self, out: list[Delta]) -> bool:
        """Read the call's closing tag, or any text instead; surplus braces are dropped."""
        self._text = self._text.lstrip(SPACE + "}")
        if not self._text or may_become(self._text, self.call_end):
            return False
        return self._then(self._text.removeprefix(self.call_end), self._next)

    @abstractmethod
    def _next(self, out: list[Delta]) -> bool:
        """Read up to the next call, or to the end of the calls."""


class JsonSection(JsonArguments):
    """Parser of calls that are objects. One whose name comes after its arguments is parsed when it is complete."""

    def __init__(self, raw: str, close: str) -> None:
        super().__init__(raw, close, self._first)
        self._listed = False
        self._read = 0  # characters of the text that were searched for the object's end

    def finish(self) -> tuple[list[Delta], str]:
        call = whole_call(self._text) if self._step == self._head else []
        self.begun = self.begun or bool(call)
        return (call, "") if call else super().finish()

    def _first(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text.startswith("[") and not self._listed:
            self._text, self._listed = self._text[1:], True
            return True
        if self._text and self._text[0] != "{":
            return self._leave(out, self._unread)
        return self._enter()

    def _enter(self) -> bool:
        self._json, self._read = JsonEnd(), 0
        return bool(self._text) and self._then(self._text, self._head)

    def _head(self, out: list[Delta]) -> bool:
        found = HEAD.match(self._text)
        name = found and _decoded(found[1])
        if found and isinstance(name, str):
            return self._begin(out, CallBegin(name), self._text[found.end() :])
        end = self._json.find(self._text, self._read)
        self._read = len(self._text)
        if end is None:
            return False
        call = whole_call(self._text[:end])
        if not call:
            return self._leave(out, self._text)
        out += call
        self.begun = True
        self.whole += 1
        return self._then(self._text[end:], self._next)

    def _next(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE + ",")
        if not self._text or self._text.startswith("{"):
            return self._enter()
        if self._text.startswith("]"):
            return self._then(self._text[1:], self._end)
        return self._end(out)

    def _end(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE) if self._close else self._text
        if not may_become(self._text, self._close):
            self.rest = self._text.removeprefix(self._close)
        return False


class KimiSection(JsonArguments):
    """Parser of calls with ids."""

    call_end = CALL_END

    def __init__(self, raw: str, close: str, known: Tools | None) -> None:
        """`known`: tools of calls outside of a section, whose first tag has been read; None: the section has begun."""
        super().__init__(raw, close, self._next)
        self._known = known
        self._text = "" if known is None else CALL

    def _next(self, out: list[Delta]) -> bool:
        text = self._text.lstrip()
        if may_become(text, CALL) or (self.begun and may_become(text, self._close)):
            return False
        if text.startswith(CALL):
            return self._then(text, self._head)
        return self._leave(out, text.removeprefix(self._close))

    def _head(self, out: list[Delta]) -> bool:
        after = self._text[len(CALL) :]
        end = after.find(ARGUMENTS)
        head = after[: possible_start(after, ARGUMENTS) if end < 0 else end]
        found = KIMI_ID.fullmatch(head.strip())
        if end < 0 and "<" not in head:
            return False
        arguments = after[end + len(ARGUMENTS) :].lstrip()
        if end >= 0 and found and not arguments:
            return False
        tool = self._known.get(found[1]) if found and self._known is not None else None
        unknown = self._known is not None and (tool is None or tool.strict)
        if end < 0 or not found or unknown or arguments[0] != "{":
            return self._leave(out, self._text)
        return self._begin(out, CallBegin(found[1], found[0]), arguments)


class JsonEnd:
    """Finder of a JSON object's end in pieces of text: after its last brace, or before a "<" outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.closed = False  # the last brace was found

    def find(self, text: str, at: int = 0) -> int | None:
        """Continue reading `text` at `at`; return the position at which the object ends, or None if it continues."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := (INSIDE_STRING if self._quoted else OUTSIDE_STRING).search(text, at):
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
                        self.closed = True
                        return at
        return None


def whole_call(text: str) -> list[Delta]:
    """Parse a complete text as one call; return no delta if it is not one."""
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

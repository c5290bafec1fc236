"""Tool calls in sections that are delimited by tokens of their own: Kimi-Linear and Kimi K2.

The chat templates of moonshotai/Kimi-K2-* and SGLang's kimi_k2 detector write them without white space. A call's id
names the function and counts the calls of the conversation; templates repeat it, so it is passed on:

<|tool_calls_section_begin|>
<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwater.server.answer.formats.delta import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    may_become,
    possible_start,
)
from headwater.server.answer.formats.grammar import Grammar, either, literal
from headwater.server.answer.formats.json_calls import JsonEnd
from headwater.server.answer.formats.parser import CallParser
from headwater.server.requests.tools import FunctionDefinition, Tools

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?([^\s<>]+?)(?::\d+)?")


class Kimi:
    """Format of the Kimi family."""

    open, close = OPEN, CLOSE
    several = True
    tags = (OPEN, CLOSE, CALL, ARGUMENTS, CALL_END)

    def used_by(self, template: str) -> bool:
        return OPEN in template

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return KimiSection(raw)

    def rule(self, grammar: Grammar, tools: Sequence[FunctionDefinition], one: bool) -> str:
        call = grammar.rule(either([self._call(grammar, tool) for tool in tools]))
        return grammar.rule(f"{call} {'' if one else f'{call}*'} {grammar.tag(CLOSE)}")

    def _call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        name = f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
        arguments = grammar.json(tool.arguments, spaced=True)
        return f"{grammar.tag(CALL)} {name} {grammar.tag(ARGUMENTS)} {arguments} {grammar.tag(CALL_END)}"


class KimiSection(CallParser):
    """Parser of all calls of one section; arguments are passed on as they come."""

    def __init__(self, raw: str) -> None:
        super().__init__(raw, self._between)
        self._arguments = JsonEnd()

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back; at most a part of a tag is dropped."""
        if not self._begun:
            return [Content(self._raw)], self._unread
        return [], self._text if self._step == self._head else ""

    def _between(self, out: list[Delta]) -> bool:
        text = self._text.lstrip()
        if not text or may_become(text, CALL) or (self._begun and may_become(text, CLOSE)):
            return False
        if text.startswith(CALL):
            self._text, self._step = text, self._head
            return True
        return self._leave(out, text.removeprefix(CLOSE))

    def _head(self, out: list[Delta]) -> bool:
        """Read the call's id, up to the first brace of its arguments."""
        after = self._text[len(CALL) :]
        end = after.find(ARGUMENTS)
        head = after[: possible_start(after, ARGUMENTS) if end < 0 else end]
        found = ID.fullmatch(head.strip())
        if end < 0 and "<" not in head:
            return False
        arguments = after[end + len(ARGUMENTS) :].lstrip()
        if end >= 0 and found and not arguments:
            return False
        if end < 0 or not found or arguments[0] != "{":
            return self._leave(out, self._text)
        out.append(CallBegin(found[1], found[0]))
        self._begun = True
        self._text, self._arguments, self._step = arguments, JsonEnd(), self._object
        return True

    def _object(self, out: list[Delta]) -> bool:
        end = self._arguments.push(self._text)
        out.append(CallArguments(self._text[:end]))
        self._text = "" if end is None else self._text[end:]
        if end is not None:
            self._step = self._end
        return end is not None

    def _end(self, out: list[Delta]) -> bool:
        """Read the call's closing tag, or any text in its place; surplus braces are dropped."""
        self._text = self._text.lstrip(" \t\r\n}")
        if not self._text or may_become(self._text, CALL_END):
            return False
        self._text, self._step = self._text.removeprefix(CALL_END), self._between
        return True

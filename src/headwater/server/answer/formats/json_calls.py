"""Calls as JSON objects between tags: one, a line each, or a list of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.server.answer.formats.delta import Content, Delta
from headwater.server.answer.formats.grammar import Grammar, either, literal
from headwater.server.answer.formats.json_call import JsonCall
from headwater.server.answer.formats.tags import may_become
from headwater.server.answer.formats.tools import CallParser, Tool, Tools

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A format, as its family writes it. What is read need not keep to it: brackets, commas and lines are optional."""

    open: str
    close: str  # empty where the list's end is the end
    before: str  # what stands between the opening tag and the first call
    between: str | None  # two calls; None: each call has tags of its own
    after: str  # the last call and the closing tag
    marks: tuple[str, ...]  # all of them are in the chat templates of this format

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.open, self.close) if tag)

    @property
    def several(self) -> bool:
        return self.between is not None

    def told_by(self, template: str) -> bool:
        plain = template.replace("\\", "")
        return all(mark in plain for mark in self.marks)

    def parser(self, raw: str, tools: Tools) -> CallParser:
        return JsonSection(raw, self.close)

    def rule(self, grammar: Grammar, tools: Sequence[Tool], one: bool) -> str:
        call = grammar.rule(either([_call(grammar, tool) for tool in tools]))
        more = "" if one or self.between is None else f"({literal(self.between)} {call})*"
        end = grammar.tag(self.close) if self.close else ""
        return grammar.rule(f"{literal(self.before)} {call} {more} {literal(self.after)} {end}")


def _call(grammar: Grammar, tool: Tool) -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    return f"{literal(head)} {grammar.json(tool.parameters, spaced=True)} {literal('}')}"


class JsonSection:
    """All calls that follow one opening tag."""

    def __init__(self, raw: str, close: str) -> None:
        self._raw = raw
        self._close = close
        self._text = ""
        self._unread = ""  # all text, until a call begins
        self._begun = self._listed = False
        self._call: JsonCall | None = None
        self._step: Callable[[list[Delta]], bool] = self._first
        self._rest: str | None = None

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        self._text += text
        if not self._begun:
            self._unread += text
        out: list[Delta] = []
        while self._rest is None and self._step(out):
            pass
        return out, self._rest

    def finish(self) -> tuple[list[Delta], str]:
        """What was held back; at most a part of the closing tag is lost."""
        out, rest = self._call.finish() if self._call is not None else ([], "")
        return (out, rest) if out or self._begun else ([Content(self._raw)], self._unread)

    # Each step reads one thing from the text; it gives False where it needs more.

    def _first(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text.startswith("[") and not self._listed:
            self._text, self._listed = self._text[1:], True
            return True
        if self._text and self._text[0] != "{":
            return self._none(out)
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
        if not self._begun:
            return self._none(out)
        if not self._call.begun:
            self._rest = rest
            return False
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

    def _none(self, out: list[Delta]) -> bool:
        """There is no call here."""
        out.append(Content(self._raw))
        self._rest = self._unread
        return False

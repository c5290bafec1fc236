"""What formats share that write tool calls between tags: finding the calls in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headwater.server.answer.formats.delta import CallBegin, Content, Delta
from headwater.server.answer.formats.grammar import Grammar
from headwater.server.answer.formats.tags import possible_start


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False


Tools = Mapping[str, Tool]  # by name


class CallParser(Protocol):
    """Parses what follows one opening tag, one call or several: text in, however it is cut.

    Both methods give deltas and the text that is not the call's, None for "none yet". What turns out to be no call
    before any CallBegin is given back: the opening tag as Content, the text after it as not the call's.
    """

    def push(self, text: str) -> tuple[list[Delta], str | None]: ...

    def finish(self) -> tuple[list[Delta], str]: ...


class ToolFormat(Protocol):
    """How a family writes tool calls."""

    open: str  # the tag that calls begin with
    close: str  # the tag that they end with
    tags: tuple[str, ...]  # all that may be tokens
    several: bool  # several calls may stand between one pair of tags

    def told_by(self, template: str) -> bool:
        """Whether a chat template writes this format."""
        ...

    def parser(self, raw: str, tools: Tools) -> CallParser:
        """A parser of what follows one opening tag; `raw` is that tag, with the white space before it."""
        ...

    def rule(self, grammar: Grammar, tools: Sequence[Tool], one: bool) -> str:
        """A rule for what follows an opening tag: calls of these tools, their arguments as the tools' schemas say."""
        ...


class CallSplitter:
    """Splits content from tool calls. White space around calls is markup; all else between them is content."""

    def __init__(self, tags: ToolFormat, tools: Tools) -> None:
        self._format = tags
        self._tools = tools
        self._held = ""
        self._call: CallParser | None = None
        self._begun = False  # the open call has had its CallBegin
        self._after_call = False  # white space to come is a call's

    def push(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._content(out) if self._call is None else self._within(out, self._call):
            pass
        return out

    def finish(self) -> list[Delta]:
        """What was held back."""
        out: list[Delta] = []
        while self._call is not None:
            deltas, rest = self._call.finish()
            self._leave(out, deltas, rest)
            while self._content(out) if self._call is None else self._within(out, self._call):
                pass
        out.append(Content(self._held))
        self._held = ""
        return out

    def _content(self, out: list[Delta]) -> bool:
        """Give what is content for certain; True if a call begins."""
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        start = self._held.find(self._format.open)
        shown = len(self._held[: possible_start(self._held, self._format.open) if start < 0 else start].rstrip())
        out.append(Content(self._held[:shown]))
        self._held = self._held[shown:]
        if start < 0:
            return False
        raw = self._held[: start - shown + len(self._format.open)]
        self._held = self._held[len(raw) :]
        self._call, self._begun = self._format.parser(raw, self._tools), False
        return True

    def _within(self, out: list[Delta], call: CallParser) -> bool:
        """Give the call its text; True if it ended."""
        text, self._held = self._held, ""
        deltas, rest = call.push(text)
        if rest is None:
            self._begun = self._begun or any(isinstance(delta, CallBegin) for delta in deltas)
            out += deltas
            return False
        self._leave(out, deltas, rest)
        return True

    def _leave(self, out: list[Delta], deltas: list[Delta], rest: str) -> None:
        out += deltas
        self._after_call = self._begun or any(isinstance(delta, CallBegin) for delta in deltas)
        self._call, self._held = None, rest

"""Parser of answers: splits text, in whatever pieces it comes, into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from headwater.server.answer.formats.delta import CallBegin, Content, Delta, Reasoning, may_become, possible_start
from headwater.server.answer.formats.grammar import Grammar
from headwater.server.requests.tools import FunctionDefinition, Tools


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags that enclose a family's reasoning. Line ends beside them are markup, as in chat templates."""

    open: str
    close: str
    models: tuple[str, ...] = ()  # models that write it although their chat templates do not; named in those templates

    def used_by(self, template: str) -> bool:
        """Return whether a chat template writes this format, or names a model that does."""
        return any(mark in template for mark in (self.close, *self.models))

    def left_open_by(self, prompt: str) -> bool:
        """Return whether the prompt ends within reasoning, so that the model continues it."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Return whether the prompt ends just after reasoning, so that the model adds none."""
        return prompt.rstrip().endswith(self.close)


class CallParser:
    """Base of parsers of the text after one opening tag, which holds one call or several; it reads one element a step.

    A step is a method that adds to a list of deltas; it returns False if it needs more text, or has set `_rest`. If the
    text turns out to be no call before any CallBegin, all of it is given back.
    """

    def __init__(self, raw: str, first: Callable[[list[Delta]], bool]) -> None:
        """`raw`: the opening tag, with the white space before it."""
        self._raw = raw
        self._text = ""
        self._unread = ""  # all text, until a call begins
        self._begun = False  # a call has begun
        self._step = first
        self._rest: str | None = None  # the text after the calls

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        """Parse the next piece; return deltas, and the text after the calls, None as long as they have not ended."""
        self._text += text
        if not self._begun:
            self._unread += text
        out: list[Delta] = []
        while self._rest is None and self._step(out):
            pass
        return out, self._rest

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back, as deltas and text after the calls; nothing may be pushed afterwards."""
        raise NotImplementedError

    def _leave(self, out: list[Delta], rest: str) -> bool:
        """End the calls before `rest`. If none has begun, the tag is content, and all text after it is unread."""
        if not self._begun:
            out.append(Content(self._raw))
        self._rest = rest if self._begun else self._unread
        return False


class ToolFormat(Protocol):
    """Format in which a family writes tool calls."""

    @property
    def open(self) -> str:
        """Tag before a call."""

    @property
    def close(self) -> str:
        """Tag after a call."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the format that may be tokens."""

    @property
    def several(self) -> bool:
        """True if several calls may stand between one pair of tags."""

    def used_by(self, template: str) -> bool:
        """Return whether a chat template writes this format."""
        ...

    def parser(self, raw: str, tools: Tools) -> CallParser:
        """Return a parser of the text after one opening tag; `raw` is that tag, with the white space before it."""
        ...

    def rule(self, grammar: Grammar, tools: Sequence[FunctionDefinition], one: bool) -> str:
        """Add a grammar rule for the text after an opening tag: calls whose arguments fit the tools' schemas."""
        ...


class AnswerParser:
    """Parser of one answer. It never raises, and the joined deltas do not depend on how the text was cut.

    Only markup and the white space beside it are dropped: text that is no well-formed call becomes content, or
    arguments if a call has begun.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Tools | None = None,
    ) -> None:
        """`thinking`: the prompt left the reasoning open. Without tools no calls are looked for."""
        self._reasoning = ReasoningSplitter(reasoning, thinking) if reasoning else None
        self._calls = CallSplitter(tool_format, tools) if tool_format and tools else None

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        return self._split(self._reasoning.push(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Delta]:
        """Release the text that was held back; nothing may be pushed afterwards."""
        deltas = self._split(self._reasoning.finish()) if self._reasoning else []
        return deltas + self._calls.finish() if self._calls else deltas

    def _split(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            out += self._calls.push(delta.text) if isinstance(delta, Content) else [delta]
        return out


class _State(Enum):
    START = auto()  # an opening tag may come
    INSIDE = auto()
    GAP = auto()  # line ends after the closing tag
    AFTER = auto()


class ReasoningSplitter:
    """Splitter of an answer into reasoning and content. Without an opening tag all text is content.

    `thinking`: the prompt left the reasoning open. Reasoning that is never closed extends to the end.
    """

    def __init__(self, tags: ReasoningFormat, thinking: bool) -> None:
        self._tags = tags
        self._thinking = thinking
        self._state = _State.START
        self._held = ""
        self._begun = False  # some reasoning was returned, so line ends belong to it

    def push(self, text: str) -> list[Delta]:
        """Split the next piece of text."""
        if self._state is _State.AFTER:
            return [Content(text)]
        self._held += text
        out: list[Delta] = []
        if self._state is _State.START:
            self._start()
        if self._state is _State.INSIDE:
            self._inside(out)
        if self._state is _State.GAP:
            self._held = self._held.lstrip("\n")
            self._state = _State.AFTER if self._held else _State.GAP
        if self._state is _State.AFTER:
            out.append(Content(self._take(len(self._held))))
        return out

    def finish(self) -> list[Delta]:
        """Release the text that was held back."""
        text = self._take(len(self._held))
        inside = self._state is _State.INSIDE or (self._state is _State.START and self._thinking)
        return [Reasoning(text) if inside else Content(text)]

    def _start(self) -> None:
        begun = self._held.lstrip()
        if may_become(begun, self._tags.open):
            return
        if begun.startswith(self._tags.open):
            self._held = begun[len(self._tags.open) :]
            self._state = _State.INSIDE
        else:
            self._state = _State.INSIDE if self._thinking else _State.AFTER

    def _inside(self, out: list[Delta]) -> None:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        end = self._held.find(self._tags.close)
        if end >= 0:
            out.append(Reasoning(self._held[:end].rstrip("\n")))
            self._held = self._held[end + len(self._tags.close) :]
            self._state = _State.GAP
            return
        shown = len(self._held[: possible_start(self._held, self._tags.close)].rstrip("\n"))
        self._begun = self._begun or shown > 0
        out.append(Reasoning(self._take(shown)))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class CallSplitter:
    """Splitter of content from tool calls. White space around calls is markup; all else between them is content."""

    def __init__(self, tags: ToolFormat, tools: Tools) -> None:
        self._format = tags
        self._tools = tools
        self._held = ""
        self._call: CallParser | None = None
        self._begun = False  # the open parser has returned a CallBegin
        self._after_call = False  # white space that follows is markup

    def push(self, text: str) -> list[Delta]:
        """Split the next piece of text."""
        self._held += text
        out: list[Delta] = []
        self._read(out)
        return out

    def finish(self) -> list[Delta]:
        """Release the text that was held back."""
        out: list[Delta] = []
        while self._call is not None:
            self._leave(out, *self._call.finish())
            self._read(out)
        out.append(Content(self._held))
        self._held = ""
        return out

    def _read(self, out: list[Delta]) -> None:
        while self._content(out) if self._call is None else self._within(out, self._call):
            pass

    def _content(self, out: list[Delta]) -> bool:
        """Add the text that is certain to be content; return whether a call begins."""
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
        """Pass the text to the open parser; return whether its calls ended."""
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

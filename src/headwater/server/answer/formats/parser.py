"""Parser of answers: splits text, in whatever pieces it comes, into reasoning, content and tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from headwater.server.answer.formats.grammar import Grammar, either, literal
from headwater.server.requests.tools import FunctionDefinition, Tools


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags that enclose a family's reasoning. Line ends next to them are markup, as in chat templates."""

    open: str
    close: str
    models: tuple[str, ...] = ()  # models that write it although their chat templates do not; named in those templates
    calls: ClassVar[ToolFormat | None] = None  # format of tool calls, if it is part of this one

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the format that may be tokens."""
        return (self.open, self.close)

    def splitter(self, thinking: bool, calls: tuple[ToolFormat, Tools] | None) -> AnswerSplitter:
        """Return a splitter of one answer; `thinking`: the prompt left the reasoning open."""
        return ReasoningSplitter(self, thinking, calls)

    def used_by(self, template: str) -> bool:
        """Return whether a chat template writes this format, or names a model that does."""
        return any(mark in template for mark in (self.close, *self.models))

    def left_open_by(self, prompt: str) -> bool:
        """Return whether the prompt ends within reasoning, so that the model continues it."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Return whether the prompt ends just after reasoning, so that the model adds none."""
        return prompt.rstrip().endswith(self.close)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Start of a tool call; the arguments that follow belong to it, until the next call begins."""

    name: str
    id: str | None = None  # the model's own id of the call, in formats that have one


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of the JSON text of the open call's arguments."""

    text: str


Delta = Reasoning | Content | CallBegin | CallArguments
Step = Callable[[list[Delta]], bool]


def joined(deltas: list[Delta]) -> list[Delta]:
    """Join neighbours of one type, and drop empty deltas."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if not isinstance(delta, CallBegin) and not isinstance(last, CallBegin | None) and type(last) is type(delta):
            out[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, CallBegin) or delta.text:
            out.append(delta)
    return out


def may_become(text: str, *tags: str) -> bool:
    """Return whether `text` is a proper prefix of a tag, so that more text could complete it."""
    return any(len(text) < len(tag) and tag.startswith(text) for tag in tags)


def first_tag(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first tag in the text, and the tag; (-1, "") if there is none."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=(-1, ""))


def possible_start(text: str, *tags: str) -> int:
    """Return the first position from which `text` ends in a proper prefix of a tag, or its length if there is none."""
    starts = range(max(0, len(text) - max(map(len, tags)) + 1), len(text))
    return next((start for start in starts if may_become(text[start:], *tags)), len(text))


class AnswerParser:
    """Parser of one answer. It never raises, and the joined deltas do not depend on how the text was cut.

    Only markup and the white space next to it are dropped: text other than a well-formed call becomes content, or
    arguments if a call has begun.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Tools | None = None,
        forced: bool = False,
        one: bool = False,
    ) -> None:
        """`thinking`: the prompt left the reasoning open. Without tools no calls are looked for.
        `forced`: the answer consists of calls only, so markup at its end is a call that was cut off, not content.
        `one`: the answer ends with its first call.
        """
        calls = (tool_format, tools) if tool_format and tools else None
        self._reasoning = reasoning.splitter(thinking, calls) if reasoning else None
        self._calls = CallSplitter(*calls, forced) if calls and not (reasoning and reasoning.calls) else None
        self._one, self._begun = one, 0  # number of calls that have begun

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        return self._limited(self._split(self._reasoning.push(text) if self._reasoning else [Content(text)]))

    def finish(self) -> list[Delta]:
        """Release the text that was held back; nothing may be pushed afterwards."""
        deltas = self._split(self._reasoning.finish()) if self._reasoning else []
        return self._limited(deltas + self._calls.finish() if self._calls else deltas)

    def _split(self, deltas: list[Delta]) -> list[Delta]:
        calls = self._calls
        if calls is None:
            return deltas
        return [one for delta in deltas for one in (calls.push(delta.text) if isinstance(delta, Content) else [delta])]

    def _limited(self, deltas: list[Delta]) -> list[Delta]:
        """Drop a call that is one too many, and all after it."""
        out: list[Delta] = []
        for delta in deltas if self._one else ():
            self._begun += isinstance(delta, CallBegin)
            out += [delta] if self._begun <= 1 else []
        return out if self._one else deltas


class Splitter:
    """Base of parsers that read one element a step.

    A step is a method that adds to a list of deltas; it returns False if it needs more text, or if it was the last.
    """

    def __init__(self, first: Step) -> None:
        self._text = ""  # not read yet
        self._step = first

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        self._text += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def _then(self, text: str, step: Step) -> bool:
        """Continue with `text` at another step."""
        self._text, self._step = text, step
        return True

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class AnswerSplitter(Splitter, ABC):
    """Base of splitters of whole answers."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """Release the text that was held back; nothing may be pushed afterwards."""


class ReasoningSplitter(AnswerSplitter):
    """Splitter of an answer into reasoning and content. Without an opening tag all text is content.

    `thinking`: the prompt left the reasoning open. Reasoning that is never closed extends to the end, or to a whole
    call of a known tool. Such a call is held back until the answer ends: if the reasoning is closed, it was a mention.
    """

    def __init__(self, tags: ReasoningFormat, thinking: bool, calls: tuple[ToolFormat, Tools] | None) -> None:
        super().__init__(self._start)
        self._tags, self._thinking, self._calls = tags, thinking, calls
        self._openings = calls[0].openings if calls else ()
        self._begun = False  # some reasoning was returned, so line ends belong to it
        self._call: CallParser | None = None
        self._mention = self._read = 0  # characters of the text: up to a tag's end, and read by `_call`

    def finish(self) -> list[Delta]:
        """Release the text that was held back."""
        inside = self._step == self._inside or (self._step == self._start and self._thinking)
        if self._step == self._held:
            inside = self._call is None or not self._call.whole
        return [Reasoning(self._text) if inside else Content(self._text)]

    def _start(self, out: list[Delta]) -> bool:
        begun = self._text.lstrip()
        if may_become(begun, self._tags.open):
            return False
        opened = begun.startswith(self._tags.open)
        rest = begun.removeprefix(self._tags.open) if opened else self._text
        return self._then(rest, self._inside if opened or self._thinking else self._after)

    def _inside(self, out: list[Delta]) -> bool:
        if not self._begun:
            self._text = self._text.lstrip("\n")
        end = self._text.find(self._tags.close)
        if end >= 0:
            out.append(Reasoning(self._text[:end].rstrip("\n")))
            return self._then(self._text[end + len(self._tags.close) :], self._gap)
        start, tag = first_tag(self._text, self._openings)
        limit = possible_start(self._text, self._tags.close, *self._openings) if start < 0 else start
        shown = len(self._text[:limit].rstrip("\n"))
        self._begun = self._begun or shown > 0
        out.append(Reasoning(self._take(shown)))
        if start < 0 or self._calls is None:
            return False
        self._mention = self._read = start - shown + len(tag)
        self._call = self._calls[0].parser("", self._calls[1], tag)
        return self._then(self._text, self._held)

    def _held(self, out: list[Delta]) -> bool:
        """Hold back a text that may be a call, until the reasoning is closed or no known tool can be called by it."""
        call, calls = self._call, self._calls
        assert call is not None and calls is not None  # noqa: PT018
        before = max(0, self._read - len(self._tags.close))
        if self._text.find(self._tags.close, before) >= 0:
            return self._then(self._text, self._inside)
        if call.rest is None:
            begun = call.begun
            names = [delta.name for delta in call.push(self._text[self._read :]) if isinstance(delta, CallBegin)]
            if not begun and (names[0] not in calls[1] if names else call.rest is not None):  # no call of a known tool
                self._begun = True
                out.append(Reasoning(self._take(self._mention)))
                return self._then(self._text, self._inside)
        self._read = len(self._text)
        return False

    def _gap(self, out: list[Delta]) -> bool:
        self._text = self._text.lstrip("\n")
        return bool(self._text) and self._then(self._text, self._after)

    def _after(self, out: list[Delta]) -> bool:
        out.append(Content(self._take(len(self._text))))
        return False


@dataclass(frozen=True, slots=True)
class ToolFormat(ABC):
    """Format in which a family writes tool calls."""

    open: str
    close: str  # empty if the end of the list ends the calls
    before: str  # text between the opening tag and the first call
    between: str | None  # text between two calls; None: each call has its own tags
    after: str  # text between the last call and the closing tag
    marks: tuple[str, ...]  # texts besides `open` that occur in each chat template of this format

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the format that may be tokens."""
        return tuple(tag for tag in (self.open, self.close) if tag)

    @property
    def bare(self) -> str:
        """Start of a call outside of the tags, as some models write it; empty if a call is not recognised there."""
        return ""

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts with which calls of this format begin."""
        return tuple(tag for tag in (self.open, self.bare) if tag)

    def used_by(self, template: str) -> bool:
        """Return whether a chat template writes this format."""
        plain = template.replace("\\", "")
        return all(mark in plain for mark in (self.open, *self.marks))

    def rule(self, grammar: Grammar, tools: Sequence[FunctionDefinition], one: bool) -> str:
        """Add a grammar rule for the text after an opening tag: calls whose arguments fit the tools' schemas."""
        call = grammar.rule(either([self.call(grammar, tool) for tool in tools]))
        more = "" if one or self.between is None else f"({literal(self.between)} {call})*"
        return grammar.rule(f"{literal(self.before)} {call} {more} {literal(self.after)} {grammar.tag(self.close)}")

    @abstractmethod
    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Return an expression for one call of this tool."""

    def unwritable(self, tool: FunctionDefinition) -> str | None:
        """Return the part of a tool's schema, if any, that would not be read back as it is written."""
        return None

    @abstractmethod
    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        """Return a parser of the text after an opening tag, `open` or `bare`; `raw` ends with it.

        After `bare` only calls of known tools that are not strict are read: grammars do not hold them.
        """


class CallParser(Splitter, ABC):
    """Base of parsers of the text after one opening tag, which holds one call or several; its last step sets `rest`.

    If the text turns out not to be a call before any CallBegin, all of it is given back.
    """

    def __init__(self, raw: str, first: Step) -> None:
        """`raw`: the opening tag, with the white space before it."""
        super().__init__(first)
        self._raw = raw
        self._unread = ""  # all text, until a call begins
        self.begun = False  # a call has begun
        self.whole = 0  # number of calls that were read to their end
        self.rest: str | None = None  # the text after the calls; None as long as they have not ended

    def push(self, text: str) -> list[Delta]:
        if not self.begun:
            self._unread += text
        return super().push(text)

    def finish(self) -> tuple[list[Delta], str]:
        """Release the text that was held back, as deltas and text after the calls; nothing may be pushed afterwards."""
        if not self.begun:
            return [Content(self._raw)], self._unread
        return [], self._text if self._step == self._head else ""

    @abstractmethod
    def _head(self, out: list[Delta]) -> bool:
        """Read a call up to its arguments. If the answer ends here, the text is content, not a call."""

    def _leave(self, out: list[Delta], rest: str) -> bool:
        """End the calls before `rest`. If none has begun, the tag is content, and all text after it is unread."""
        if not self.begun:
            out.append(Content(self._raw))
        self.rest = rest if self.begun else self._unread
        return False


class CallSplitter(Splitter):
    """Splitter of content from tool calls. White space around calls is markup; all else between them is content."""

    def __init__(self, tags: ToolFormat, tools: Tools, forced: bool = False) -> None:
        """`forced`: text that is held back at the end belongs to a call that was cut off before its name."""
        super().__init__(self._content)
        self._format, self._tools, self._forced = tags, tools, forced
        self._call: CallParser | None = None
        self._after_call = False  # white space that follows is markup

    def finish(self) -> list[Delta]:
        """Release the text that was held back."""
        out: list[Delta] = []
        while self._call is not None:
            deltas, rest = self._call.finish()
            if self._forced:
                return [delta for delta in deltas if not isinstance(delta, Content)]
            self._leave(self._call, rest)
            out += deltas + self.push("")
        return [] if self._forced else [*out, Content(self._text)]

    def _content(self, out: list[Delta]) -> bool:
        """Add the text that is certain to be content, up to an opening tag."""
        if self._after_call:
            self._text = self._text.lstrip()
            self._after_call = not self._text
        openings = self._format.openings
        start, tag = first_tag(self._text, openings)
        shown = self._text[: possible_start(self._text, *openings) if start < 0 else start].rstrip()
        out.append(Content(self._take(len(shown))))
        if start < 0:
            return False
        raw = self._take(start - len(shown) + len(tag))
        self._call, self._step = self._format.parser(raw, self._tools, tag), self._within
        return True

    def _within(self, out: list[Delta]) -> bool:
        assert self._call is not None
        out += self._call.push(self._take(len(self._text)))
        if self._call.rest is not None:
            self._leave(self._call, self._call.rest)
        return self._call is None

    def _leave(self, call: CallParser, rest: str) -> None:
        self._call, self._after_call, self._text, self._step = None, call.begun, rest, self._content

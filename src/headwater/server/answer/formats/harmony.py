"""Harmony, the format of gpt-oss: messages in channels, which are reasoning, texts for the user, or tool calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>

The prompt ends with `<|start|>assistant`. A call ends the answer (openai/openai-cookbook, articles/openai-harmony.md).
Chat templates print the recipient of a call before its channel. Messages without one are commentary for the user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headwater.request import Constraint
from headwater.server.answer.formats.grammar import Grammar, either, literal
from headwater.server.answer.formats.parser import (
    AnswerSplitter,
    CallArguments,
    CallBegin,
    CallParser,
    Content,
    Delta,
    Reasoning,
    ReasoningFormat,
    ToolFormat,
    first_tag,
    may_become,
    possible_start,
)
from headwater.server.requests.tools import FunctionDefinition, Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
HEADS = (CHANNEL, START, "assistant", "to=")  # beginnings of a message's head, after white space
MAX_HEAD = 256  # characters: a longer one is text
RECIPIENT, NAMED_CHANNEL = re.compile(r"to=(?:functions\.)?([^\s<]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"


@dataclass(frozen=True, slots=True)
class HarmonyCalls(ToolFormat):
    """Calls in the channel of commentary, whose bodies are JSON objects; they are read with all other messages."""

    @property
    def tags(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL)

    def call(self, grammar: Grammar, tool: FunctionDefinition) -> str:
        """Build a message to the tool, with the recipient after the channel or before it."""
        name, channel, constrain = literal(f"to=functions.{tool.name}"), grammar.tag(CHANNEL), grammar.tag(CONSTRAIN)
        kind = f'" " ({constrain} "json" | "json")'
        heads = f'({channel} "commentary " {name} ({kind})? | " " {name} {channel} "commentary" ({kind})?)'
        return f"{heads} {grammar.tag(MESSAGE)} {grammar.json(tool.arguments, tool.strict)}"

    def parser(self, raw: str, tools: Tools, tag: str) -> CallParser:
        raise NotImplementedError("HarmonySplitter reads calls")


CALLS = HarmonyCalls(CHANNEL, CALL, "", None, "", (ANALYSIS,))


@dataclass(frozen=True, slots=True)
class Harmony(ReasoningFormat):
    """Channels of messages, of which that of analysis is the reasoning."""

    calls: ClassVar[ToolFormat] = CALLS

    @property
    def tags(self) -> tuple[str, ...]:
        return CALLS.tags

    def used_by(self, template: str) -> bool:
        return self.open in template

    def closed_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(FINAL)

    def splitter(self, thinking: bool, calls: tuple[ToolFormat, Tools] | None) -> AnswerSplitter:
        return HarmonySplitter(thinking, calls is not None)

    def before(self, grammar: Grammar, prompt_end: str) -> str:
        """Return an expression for the reasoning before the last message, up to its head."""
        if self.closed_by(prompt_end):
            return ""
        next_head = f'{grammar.until(END)} {grammar.tag(START)} "assistant"'
        if self.left_open_by(prompt_end):
            return next_head
        return f'({grammar.tag(CHANNEL)} "analysis" {grammar.tag(MESSAGE)} {next_head})?'

    def answer(
        self, grammar: Grammar, prompt_end: str, tools: Sequence[FunctionDefinition], form: Constraint | None
    ) -> str:
        """Return an expression for reasoning, then a call of one of the tools or a last message that fits the form."""
        answers = [CALLS.call(grammar, tool) for tool in tools]
        if form is not None:
            head = "" if self.closed_by(prompt_end) else f'{grammar.tag(CHANNEL)} "final" {grammar.tag(MESSAGE)}'
            answers.append(f"{head} {grammar.fitting(form)}")
        return f"{self.before(grammar, prompt_end)} {either(answers)}"

    def free_answer(self, grammar: Grammar, prompt_end: str, tools: Sequence[FunctionDefinition]) -> str:
        """Return an expression for any messages, the last of which may be a call of one of the tools."""
        if self.closed_by(prompt_end):
            return grammar.text()
        channel, message, end = (grammar.tag(tag) for tag in (CHANNEL, MESSAGE, END))
        preamble = grammar.rule(
            f'{channel} "commentary" {message} {grammar.text()} {end} {grammar.tag(START)} "assistant"'
        )
        final = f'{channel} "final" {message} {grammar.text()}'
        last = either([final, *(CALLS.call(grammar, tool) for tool in tools)])
        thought = self.before(grammar, prompt_end)
        again = self.before(grammar, "")
        return grammar.rule(f"{thought} ({preamble} {again})* {last}")


class HarmonySplitter(AnswerSplitter):
    """Splitter of messages. Text without a head is content; of a head that was cut off nothing is shown."""

    def __init__(self, thinking: bool, has_tools: bool) -> None:
        """`thinking`: the prompt ends with the head of a message of analysis."""
        super().__init__(self._body if thinking else self._head)
        self._has_tools = has_tools  # else calls are content
        self._kind: type[Reasoning | Content | CallArguments] = Reasoning if thinking else Content
        self._shown = {Reasoning: False, Content: False, CallArguments: False}  # some text of the kind

    def finish(self) -> list[Delta]:
        """Release the text that was held back."""
        if self._step == self._head:
            return [] if self._text.lstrip().startswith((START, CHANNEL)) else [Content(self._text)]
        out: list[Delta] = [self._kind(self._text)]
        self._complete(out)
        return out

    def _head(self, out: list[Delta]) -> bool:
        begun = self._text.lstrip()
        if not begun or may_become(begun, *HEADS):
            return False
        end = self._text.find(MESSAGE)
        if not begun.startswith(HEADS) or (end < 0 and len(begun) > MAX_HEAD):
            self._kind = Content
            return self._then(self._text, self._body)
        if end < 0:
            return False
        self._begin(out, self._text[:end])
        return self._then(self._text[end + len(MESSAGE) :], self._body)

    def _begin(self, out: list[Delta], head: str) -> None:
        """Begin the message that a head describes; messages of one kind are apart by a line end."""
        recipient, channel = RECIPIENT.search(head), NAMED_CHANNEL.search(head)
        if recipient is not None and self._has_tools:
            self._kind, self._shown[CallArguments] = CallArguments, False
            out.append(CallBegin(recipient[1]))
            return
        self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Content
        if self._shown[self._kind]:
            out.append(self._kind("\n"))

    def _body(self, out: list[Delta]) -> bool:
        at, tag = first_tag(self._text, ENDS)
        shown = self._take(possible_start(self._text, *ENDS) if at < 0 else at)
        self._shown[self._kind] |= bool(shown)
        out.append(self._kind(shown))
        if at < 0:
            return False
        self._complete(out)
        return self._then(self._text[len(tag) :], self._head)

    def _complete(self, out: list[Delta]) -> None:
        """Give a call without arguments an empty object."""
        if self._kind is CallArguments and not self._shown[CallArguments]:
            out.append(CallArguments("{}"))


HARMONY = Harmony(ANALYSIS, END)

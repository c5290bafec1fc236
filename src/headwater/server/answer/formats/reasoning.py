"""Splits an answer's reasoning from what it says, in the tags of the model's family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from headwater.server.answer.formats.delta import Content, Delta, Reasoning
from headwater.server.answer.formats.tags import may_become, possible_start


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A family's tags. Line ends beside them are markup, as chat templates have it."""

    open: str
    close: str
    models: tuple[str, ...] = ()  # that write it unasked, by their names in chat templates that say nothing of it

    def told_by(self, template: str) -> bool:
        """Whether a chat template writes this format, or tells a model that does."""
        return any(mark in template for mark in (self.close, *self.models))

    def left_open_by(self, prompt: str) -> bool:
        """Whether the prompt ends within reasoning, so that the model goes on with it."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends just after reasoning, so that the model adds none."""
        return prompt.rstrip().endswith(self.close)


class _State(Enum):
    START = auto()  # an opening tag may come
    INSIDE = auto()
    GAP = auto()  # line ends after the closing tag
    AFTER = auto()


class ReasoningSplitter:
    """Text in, however it is cut; reasoning and content out. Without an opening tag all is content.

    `thinking`: the prompt left the reasoning open. What is never closed is all reasoning.
    """

    def __init__(self, tags: ReasoningFormat, thinking: bool) -> None:
        self._tags = tags
        self._thinking = thinking
        self._state = _State.START
        self._held = ""
        self._begun = False  # some reasoning is out, so line ends are its own

    def push(self, text: str) -> list[Delta]:
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
        """What was held back."""
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

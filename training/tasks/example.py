"""One example of a task: a whole conversation, of which the assistant's turns are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]

SINGLE, TWO_HOP, ABSENT, MEMORY, PERSONA, TOOL, TEXT = (
    "single",
    "two_hop",
    "absent",
    "memory",
    "persona",
    "tool",
    "text",
)
PAIRS = "pairs"  # names of a list and their values: recall at its simplest
RECALL = (SINGLE, TWO_HOP, ABSENT)  # kinds of questions about documents
KINDS = (PAIRS, *RECALL, MEMORY, PERSONA, TOOL, TEXT)

NOT_IN_DOCUMENTS = "Not in the documents."
NOT_TOLD = "You have not told me."
NOTED = "Noted."


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation with its questions.

    `asked` has (kind, accepted answers) of each of the assistant's turns that answer a question of a kind, and
    `turns` their places in `messages`. A text (kind "text") is one message of the assistant's and has no chat markup.
    """

    kind: str
    messages: list[Message]
    tools: list[Tool] | None = None
    documents: tuple[str, ...] = ()  # as they stand in the prompt
    asked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    turns: tuple[int, ...] = ()

"""Where a text is cut into segments: marks that are sent on purpose, told apart from texts that look like them.

What a client sends as markup becomes a mark that nobody can write who was not told it: so a separator that is merely
quoted, in what a tool returned or a document says, is nothing but characters, whatever a template does to it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headwater.server.requests.messages import Breakpoint, Conversation, Message

QUOTING = ("assistant", "tool")  # roles whose texts are written by models and tools: separators in them are quotes
NONCE = f"x{secrets.token_hex(16)}"  # letters and digits alone: no filter of a template changes them


class Edge(Enum):
    OPEN = f"{NONCE}o"  # a segment begins
    CLOSE = f"{NONCE}c"  # a segment ends, and none begins
    SEPARATOR = f"{NONCE}s"  # either, by what follows


RENDERED = re.compile("|".join(edge.value for edge in Edge))


@dataclass(frozen=True, slots=True)
class Mark:
    """Characters [start, end) of a text that cut it and are no part of what is cut."""

    start: int
    end: int
    edge: Edge


def separators(text: str, separator: str) -> list[Mark]:
    """Of a text that is markup."""
    return [Mark(*found.span(), Edge.SEPARATOR) for found in re.finditer(re.escape(separator), text)]


def rendered_marks(text: str) -> list[Mark]:
    """Of a text in which marks are written out."""
    return [Mark(*found.span(), Edge(found[0])) for found in RENDERED.finditer(text)]


def resolved(marks: Sequence[Mark]) -> list[Mark]:
    """Marks that open or close: a separator opens a segment if another one comes next, else it closes one.

    A closing one is taken into the mark that follows it at once, if one does.
    """
    told: list[Mark] = []
    start = None  # of a mark that was taken into the next
    for number, mark in enumerate(marks):
        following = marks[number + 1] if number + 1 < len(marks) else None
        opens = mark.edge is Edge.OPEN
        if mark.edge is Edge.SEPARATOR:
            opens = following is not None and following.edge is Edge.SEPARATOR
        start = mark.start if start is None else start
        if opens or following is None or following.start > mark.end:
            told.append(Mark(start, mark.end, Edge.OPEN if opens else Edge.CLOSE))
            start = None
    return told


def shown(text: str, separator: str) -> str:
    """A text with marks as a client may see it."""
    return RENDERED.sub(lambda _: separator, text)


def as_segment(text: str) -> str:
    return f"{Edge.OPEN.value}{text}{Edge.CLOSE.value}"


def marked(conversation: Conversation, separator: str) -> Conversation:
    """The conversation with marks written into its messages' contents; breakpoints move with what they are in."""
    messages, breakpoints = list(conversation.messages), list(conversation.breakpoints)
    for number, message in enumerate(messages):
        marks = _marks(conversation, number, message, separator)
        if not marks:
            continue
        messages[number] = {**message, "content": _written(message["content"], marks)}
        for i, point in enumerate(breakpoints):
            if point.message == number:
                breakpoints[i] = Breakpoint(number, _moved(point.characters, marks))
    return replace(conversation, messages=tuple(messages), breakpoints=tuple(breakpoints))


def _marks(conversation: Conversation, number: int, message: Message, separator: str) -> list[Mark]:
    """Those of one message's content: around parts that are segments, and separators outside of parts that say."""
    content, said = message["content"], [part for part in conversation.parts if part.message == number]
    found: list[Mark] = []
    for part in said:
        if part.segment:
            found += Mark(part.start, part.start, Edge.OPEN), Mark(part.end, part.end, Edge.CLOSE)
    if message["role"] not in QUOTING:
        at = 0
        for start, end in [*((part.start, part.end) for part in said), (len(content), len(content))]:
            found += _shifted(separators(content[at:start], separator), at)
            at = end
    found.sort(key=lambda mark: (mark.start, mark.edge is not Edge.CLOSE))
    return resolved(found)


def _shifted(marks: Iterable[Mark], characters: int) -> list[Mark]:
    return [replace(mark, start=mark.start + characters, end=mark.end + characters) for mark in marks]


def _written(content: str, marks: Sequence[Mark]) -> str:
    pieces, at = [], 0
    for mark in marks:
        pieces += content[at : mark.start], mark.edge.value
        at = mark.end
    return "".join([*pieces, content[at:]])


def _moved(characters: int, marks: Iterable[Mark]) -> int:
    """Where a place in the content is, now that the marks before it are written out."""
    return characters + sum(len(m.edge.value) - (m.end - m.start) for m in marks if m.start < characters)

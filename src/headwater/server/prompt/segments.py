"""Segments of a prompt: marks in its text that delimit them, and their encoding each on its own.

A segment's tokens do not depend on its neighbours. A separator that a client sends as markup becomes a mark with a
secret nonce. So a separator that is only quoted, in a tool's result or in a document, stays plain characters, whatever
a template does to it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from tokenizers import Tokenizer

from headwater.config import DEFAULT_SEPARATOR
from headwater.request import Span
from headwater.server.prompt.encoding import Encoded, PromptEncoder, check_length, encode, longest_token
from headwater.server.requests.messages import Breakpoint, Conversation
from headwater.server.requests.normal_form import Message

QUOTING = ("assistant", "tool")  # roles whose texts come from models and tools: separators in them are quotes
NONCE = f"x{secrets.token_hex(16)}"  # only letters and digits: no filter of a template changes it


class Edge(Enum):
    """Kind of a mark, and the text that stands for it in a rendered prompt."""

    OPEN = f"{NONCE}o"  # begins a segment
    CLOSE = f"{NONCE}c"  # ends a segment and begins none
    SEPARATOR = f"{NONCE}s"  # either one, depending on the next mark


RENDERED = re.compile("|".join(edge.value for edge in Edge))


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark at characters [start, end) of a text; these belong to no segment."""

    start: int
    end: int
    edge: Edge


Place = TypeVar("Place", Mark, Span)


def separators(text: str, separator: str) -> list[Mark]:
    """Find the separators of a text in which they are markup."""
    return [Mark(*found.span(), Edge.SEPARATOR) for found in re.finditer(re.escape(separator), text)]


def rendered_marks(text: str) -> list[Mark]:
    """Find the marks of a rendered text."""
    return [Mark(*found.span(), Edge(found[0])) for found in RENDERED.finditer(text)]


def resolved(marks: Sequence[Mark]) -> list[Mark]:
    """Resolve separators to marks that open or close.

    A separator opens a segment if another separator is next, else it closes one. A closing mark is merged into a
    mark that follows immediately.
    """
    merged: list[Mark] = []
    start = None  # of a mark that was merged into the next one
    for number, mark in enumerate(marks):
        following = marks[number + 1] if number + 1 < len(marks) else None
        opens = mark.edge is Edge.OPEN
        if mark.edge is Edge.SEPARATOR:
            opens = following is not None and following.edge is Edge.SEPARATOR
        start = mark.start if start is None else start
        if opens or following is None or following.start > mark.end:
            merged.append(Mark(start, mark.end, Edge.OPEN if opens else Edge.CLOSE))
            start = None
    return merged


def shown(text: str, separator: str) -> str:
    """Replace the marks of a text by separators, as a client may see it."""
    return RENDERED.sub(lambda _: separator, text)


def as_segment(text: str) -> str:
    """Put the marks of a segment around a text."""
    return f"{Edge.OPEN.value}{text}{Edge.CLOSE.value}"


def marked(conversation: Conversation, separator: str) -> Conversation:
    """Write marks into the contents of a conversation's messages, and move its breakpoints accordingly."""
    messages, breakpoints = list(conversation.messages), list(conversation.breakpoints)
    for number, message in enumerate(messages):
        marks = _marks(conversation, number, message, separator)
        if not marks:
            continue
        messages[number] = {**message, "content": _written(message["content"], marks)}
        breakpoints = [_moved(point, marks) if point.message == number else point for point in breakpoints]
    return replace(conversation, messages=tuple(messages), breakpoints=tuple(breakpoints))


def _marks(conversation: Conversation, number: int, message: Message, separator: str) -> list[Mark]:
    """Return the marks of one message: around declared segments, and for separators outside of declared parts."""
    content, declared = message["content"], [part for part in conversation.parts if part.message == number]
    found: list[Mark] = []
    for part in declared:
        if part.segment:
            found += Mark(part.start, part.start, Edge.OPEN), Mark(part.end, part.end, Edge.CLOSE)
    if message["role"] not in QUOTING:
        at = 0
        for start, end in [*((part.start, part.end) for part in declared), (len(content), len(content))]:
            found += _shifted(separators(content[at:start], separator), at)
            at = end
    found.sort(key=lambda mark: (mark.start, mark.edge is not Edge.CLOSE))
    return resolved(found)


def _shifted(places: Iterable[Place], by: int) -> tuple[Place, ...]:
    return tuple(replace(place, start=place.start + by, end=place.end + by) for place in places)


def _written(content: str, marks: Sequence[Mark]) -> str:
    pieces: list[str] = []
    at = 0
    for mark in marks:
        pieces += content[at : mark.start], mark.edge.value
        at = mark.end
    return "".join([*pieces, content[at:]])


def _moved(point: Breakpoint, marks: Iterable[Mark]) -> Breakpoint:
    """Move a breakpoint by the marks that are written out before it."""
    added = sum(len(m.edge.value) - (m.end - m.start) for m in marks if m.start < point.characters)
    return replace(point, characters=point.characters + added)


class SegmentEncoder:
    """Encoder of prompts part by part: texts before, between and after segments, and each segment.

    If the tokenizer has an added token for the separator, it begins each part but the first; otherwise separators leave
    no tokens. A separator that is not a mark is encoded as plain characters, never as that token. Thread safe.
    """

    def __init__(self, tokenizer: Tokenizer, separator: str = DEFAULT_SEPARATOR, max_tokens: int | None = None) -> None:
        """A text that certainly has more than `max_tokens` tokens is not encoded, but raises RequestTooLarge."""
        self.separator = separator
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._token_bytes = None if max_tokens is None else longest_token(tokenizer)
        self._encoder = PromptEncoder(tokenizer)
        added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._token = added.get(separator)
        self._kept = () if self._token is None else (self._token,)  # tokens that a separator leaves in the prompt
        first, rest = re.escape(separator[0]), re.escape(separator[1:])
        self._within = re.compile(f"(?<={first})(?={rest})")
        self._before, self._after = _frame(tokenizer)

    def encode(self, text: str, marks: Sequence[Mark] = (), namespace: str = "") -> Encoded:
        """Encode without the tokens that begin and end a text; `ends` are in characters of the text with its marks."""
        self._check_length(text)
        if not marks and (self._token is None or self.separator not in text):
            return self._encoder.encode(text, namespace)
        marks = resolved(marks)
        starts, stops = [0, *(mark.end for mark in marks)], [*(mark.start for mark in marks), len(text)]
        parts = [self._plain(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        encoded = iter(self._encoder.encode_each([piece for part in parts for piece in part], namespace))
        ids: list[int] = []
        ends: list[int] = []
        cuts: list[int] = []
        for number, (at, part) in enumerate(zip(starts, parts, strict=True)):
            if number:
                cuts.append(len(ids))
                ids += self._kept
                ends += [at] * len(self._kept)
            for piece in part:
                known = next(encoded)
                ids += known.ids
                ends += [at + end for end in known.ends]
                at += len(piece)
        opens = [mark.edge is Edge.OPEN for mark in marks]
        return Encoded(tuple(ids), ends, spans(cuts, opens, len(ids), len(self._kept)))

    def encode_prompt(self, text: str, add_special_tokens: bool = True, namespace: str = "") -> Encoded:
        """Encode a completion's prompt, in which separators are markup, with the tokens that begin and end a text."""
        self._check_length(text)
        marks = separators(text, self.separator)
        if not marks:
            whole = encode(self._tokenizer, text, add_special_tokens)
            return Encoded(tuple(whole.ids), [end for _, end in whole.offsets])
        inner = self.encode(text, marks, namespace)
        if not add_special_tokens:
            return inner
        before, after = self._before, self._after
        ends = [*[0] * len(before), *inner.ends, *[len(text)] * len(after)]
        return Encoded((*before, *inner.ids, *after), ends, _shifted(inner.segments, len(before)))

    def encode_segment(self, text: str, namespace: str = "") -> tuple[int, ...]:
        """Return the tokens of a text as a segment of a prompt."""
        return self.encode(text, [Mark(0, 0, Edge.OPEN)], namespace).ids

    def segments_of(self, ids: Sequence[int]) -> tuple[Span, ...]:
        """Return the segments of a prompt of token ids; there are none unless the separator is a token."""
        begin = len(self._before) if tuple(ids[: len(self._before)]) == self._before else 0
        inner = ids[begin:]
        cuts = [at for at, token in enumerate(inner) if token == self._token]
        opens = [at < cuts[-1] for at in cuts]
        return _shifted(spans(cuts, opens, len(inner), len(self._kept)), begin)

    def _check_length(self, text: str) -> None:
        if self._max_tokens is not None:
            check_length(self._tokenizer, text, self._max_tokens, self._token_bytes)

    def _plain(self, text: str) -> list[str]:
        """Split a text so that no piece holds the separator, if it is a token."""
        return [text] if self._token is None else self._within.split(text)


def spans(cuts: Sequence[int], opens: Sequence[bool], end: int, separator: int) -> tuple[Span, ...]:
    """Return the segments of a prompt of `end` tokens that is cut at these positions, `separator` tokens at each cut.

    A segment at the start of the prompt is left to prefix caching, which keeps it whole. But a segment that is the
    whole prompt is returned: it was sent to be stored.
    """
    alone = len(cuts) == 2 and cuts[-1] + separator == end
    ends = [*cuts[1:], end][: len(cuts)]
    found = zip(cuts, ends, opens, strict=True)
    return tuple(Span(a, b) for a, b, is_open in found if is_open and b > a and (a > 0 or alone))


def _frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the tokenizer puts before and after each text."""
    example = encode(tokenizer, "a", add_special_tokens=True)
    own = [at for at, special in enumerate(example.special_tokens_mask) if not special]
    return (tuple(example.ids[: own[0]]), tuple(example.ids[own[-1] + 1 :])) if own else ((), ())

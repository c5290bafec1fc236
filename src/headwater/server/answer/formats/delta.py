"""Deltas, the pieces into which an answer is parsed, and tags that may be cut across pieces of text."""

from __future__ import annotations

from dataclasses import dataclass


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


def joined(deltas: list[Delta]) -> list[Delta]:
    """Join neighbours of one type, and drop empty deltas."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, CallBegin):
            out.append(delta)
        elif delta.text and last is not None and not isinstance(last, CallBegin) and type(last) is type(delta):
            out[-1] = type(delta)(last.text + delta.text)
        elif delta.text:
            out.append(delta)
    return out


def may_become(text: str, tag: str) -> bool:
    """Return whether `text` is a proper prefix of the tag, so that more text could complete it."""
    return len(text) < len(tag) and tag.startswith(text)


def possible_start(text: str, *tags: str) -> int:
    """Return the first position from which `text` ends in a proper prefix of a tag, or its length if there is none."""
    longest = max(map(len, tags))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(may_become(text[start:], tag) for tag in tags):
            return start
    return len(text)

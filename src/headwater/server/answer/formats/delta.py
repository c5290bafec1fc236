"""What a parser of answers gives: pieces, in order, that joined are the whole answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; the arguments that follow are its own, until the next one begins."""

    name: str
    id: str | None = None  # what the model calls it, where it does


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the open call's arguments."""

    text: str


Delta = Reasoning | Content | CallBegin | CallArguments


def joined(deltas: list[Delta]) -> list[Delta]:
    """The same answer in as few pieces as can be, none of them empty."""
    out: list[Delta] = []
    for delta in deltas:
        if not isinstance(delta, CallBegin) and not delta.text:
            continue
        last = out[-1] if out else None
        if isinstance(delta, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            out[-1] = CallArguments(last.text + delta.text)
        else:
            out.append(delta)
    return out

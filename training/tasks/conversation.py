"""Turns put together to an example of a limited number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from training.tasks.budget import Count, of_messages, of_tools
from training.tasks.example import Example, Message, Tool


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a conversation: the user's message and the assistant's answer."""

    user: str
    answer: Message
    kind: str | None = None  # None: no question of a kind
    accepted: tuple[str, ...] = ()
    after: tuple[Message, ...] = field(default=())  # a tool's response, and the reply to it

    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.user}, self.answer, *self.after)


def said(user: str, answer: str, kind: str | None = None) -> Turn:
    return Turn(user, {"role": "assistant", "content": answer}, kind, (answer,) if kind else ())


def assembled(
    kind: str,
    system: str,
    turns: Sequence[Turn],
    room: tuple[int, Count],
    tools: list[Tool] | None = None,
    documents: tuple[str, ...] = (),
) -> Example:
    """The conversation up to the last turn that fits in `room`: tokens, and what counts them.

    The first turn is always there, and a turn that asks nothing is not the last one.
    """
    tokens, count = room
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    used = of_messages(messages, count) + of_tools(tools, count)
    kept: list[Turn] = []
    for turn in turns:
        used += of_messages(turn.messages(), count)
        if kept and used > tokens:
            break
        kept.append(turn)
    while len(kept) > 1 and kept[-1].kind is None:
        kept.pop()
    asked, places = [], []
    for turn in kept:
        if turn.kind is not None:
            asked.append((turn.kind, turn.accepted))
            places.append(len(messages) + 1)
        messages.extend(turn.messages())
    return Example(kind, messages, tools, documents, tuple(asked), tuple(places))

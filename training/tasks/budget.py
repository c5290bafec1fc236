"""How many tokens a text will take, before there is a tokenizer or without waiting for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from training.tasks.example import Message, Tool

Count: TypeAlias = Callable[[str], int]

CHARACTERS = 3.3  # of a token, at the least, over texts of some length
TURN = 6  # tokens of markup around a message


def estimate(text: str) -> int:
    """At least as many tokens as the tokenizer makes of it, save for very short texts."""
    return int(len(text) / CHARACTERS) + 1


def of_message(message: Message, count: Count) -> int:
    """Tool calls are counted as the text that they become."""
    calls = [str(call["function"]["arguments"]) + call["function"]["name"] for call in message.get("tool_calls", ())]
    return TURN + count(message.get("content") or "") + sum(count(call) + 20 for call in calls)


def of_messages(messages: Iterable[Message], count: Count) -> int:
    return sum(of_message(message, count) for message in messages)


def of_tools(tools: Iterable[Tool] | None, count: Count) -> int:
    return sum(count(str(tool)) + 1 for tool in tools) + 40 if tools else 0

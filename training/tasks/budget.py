"""Estimate of the tokens of a text, without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from training.tasks.example import Message, Tool

Count: TypeAlias = Callable[[str], int]

TURN = 6  # tokens of markup around a message
PIECE = re.compile(r"[A-Z]?[a-z]{1,7}|[A-Z]|\d|[^\sA-Za-z\d]+|\n+")  # each about a token
NAME = re.compile(r"[A-Z][a-z]{3,}")  # made-up ones have about two
MORE_OF_NAME, MARGIN, PROSE_MARGIN = 0.7, 1.02, 1.2


def estimate(text: str) -> int:
    """Somewhat more tokens than the tokenizer makes of it, over texts of some length."""
    return int(MARGIN * (len(PIECE.findall(text)) + MORE_OF_NAME * len(NAME.findall(text)))) + 1


def estimate_prose(text: str) -> int:
    """Likewise, of plain text, whose words are rarer."""
    return int(PROSE_MARGIN * estimate(text)) + 1


def of_message(message: Message, count: Count) -> int:
    """Tool calls are counted as the text that they become."""
    calls = [str(call["function"]["arguments"]) + call["function"]["name"] for call in message.get("tool_calls", ())]
    return TURN + count(message.get("content") or "") + sum(count(call) + 20 for call in calls)


def of_messages(messages: Iterable[Message], count: Count) -> int:
    return sum(of_message(message, count) for message in messages)


def of_tools(tools: Iterable[Tool] | None, count: Count) -> int:
    return sum(count(str(tool)) + 1 for tool in tools) + 40 if tools else 0

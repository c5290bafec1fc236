"""ShareGPT's JSON: an array of {"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}]}."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat
from headwater.traces.reader import has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"bard": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}


class ShareGpt:
    """Each answer that follows something is a request's."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._unanswered = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "conversations")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, record in enumerate(source.records(), 1):
            messages = [{"role": _role(turn["from"]), "content": turn["value"]} for turn in record["conversations"]]
            replies = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
            if not replies:
                self._unanswered += 1
                continue
            chat = Chat(self._tokens, messages)
            text, name = chat.text(), f"{record.get('id', '')} {number}".strip()  # ids are not unique in these files
            for reply in replies:
                yield chat.request(name, text, reply)

    def notes(self) -> tuple[str, ...]:
        return (f"{self._unanswered:,} conversations without an answer are left out",) if self._unanswered else ()


def _role(name: str) -> str:
    if name not in ROLES:
        raise ValueError(f"from is {name!r}, must be one of {', '.join(ROLES)}")
    return ROLES[name]

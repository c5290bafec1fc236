"""Questions with the passages that were retrieved for them, one a line: `question`, `passages` [{`title`, `text`}].

A request has its passages as segments, in their order, and the question behind them. The first of `answers` is what was
generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat
from headwater.traces.reader import has
from headwater.traces.request import Request
from headwater.traces.segments import Piece, document_text
from headwater.traces.source import Source
from headwater.traces.tokens import Remembered, Tokens


class Passages:
    """Each question is a session of its own."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = Remembered(tokens)
        self._seen: set[str] = set()
        self._count = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "question", "passages")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, record in enumerate(source.records(), 1):
            texts = texts_of(record)
            self._count += len(texts)
            self._seen.update(texts)
            chat = Chat(self._tokens)
            chat.say({"role": "user", "content": record["question"]}, [Piece(text, True) for text in texts])
            chat.say({"role": "assistant", "content": (record.get("answers") or [""])[0]})
            yield chat.request(f"{record.get('id', '')} {number}".strip(), chat.text(), 1)

    def notes(self) -> tuple[str, ...]:
        return (f"{self._count:,} passages, {len(self._seen):,} of them different",)


def texts_of(record: Any) -> list[str]:
    """The passages of a record, or its one document, as they stand in a prompt."""
    if "passages" in record:
        return [document_text(passage["text"], passage.get("title")) for passage in record["passages"]]
    return [document_text(record["text"], record.get("title"))]

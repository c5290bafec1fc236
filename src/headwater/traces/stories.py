"""Long documents with questions, one document a line: `text` and `questions` [{`question`, `answers`}] (SQuALITY).

A document is a session: each of its questions is asked of the document alone, without the questions before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat
from headwater.traces.reader import has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens


class Stories:
    """The first of the answers is what was generated."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "text", "questions") and bool(first["questions"])

    def requests(self, source: Source) -> Iterator[Request]:
        for number, record in enumerate(source.records(), 1):
            document = self._tokens.of(record["text"])
            for question in record["questions"]:
                chat = Chat(self._tokens)
                chat.add("user", document + self._tokens.of(f"\n\n{question['question']}"))
                chat.add("assistant", self._tokens.of((question.get("answers") or [""])[0]))
                yield chat.request(str(record.get("id", number)), chat.text(), 1)

    def notes(self) -> tuple[str, ...]:
        return ("a question is asked of its document alone, without those before",)

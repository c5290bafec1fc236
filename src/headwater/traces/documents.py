"""Texts of documents: read as they grow, version by version, or with questions about them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat, Piece, document_text
from headwater.traces.reader import Reader, has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Remembered, Tokens

CONTEXT_TOKENS = 131_072


class Passages(Reader):
    """Questions with retrieved passages, one a line: `question`, `passages` [{`title`, `text`}].

    Each question is a session. Its prompt has the passages as segments, in their order, and the question after them.
    The first of `answers` is the generated text.
    """

    about = "as retrieved"
    fields = ("id", "question", "passages", "answers")

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Remembered(tokens))
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


class Stories(Reader):
    """Long documents with questions, one document a line: `text` and `questions` [{`question`, `answers`}] (SQuALITY).

    A document is a session: each question follows the document, without the questions before. The first of
    `answers` is the generated text.
    """

    about = "long documents with questions about each (SQuALITY)"
    fields = ("id", "text", "questions")

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
        return ("a question follows its document, without the questions before",)


class Books(Reader):
    """Books, a chapter a line in reading order: `id` (book/chapter) and `text`.

    A book is a session: each request has all chapters so far. After CONTEXT_TOKENS the next chapter begins a new text.
    """

    about = "chapter by chapter"
    fields = ("id", "text", "chapter")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "id", "text", "chapter")

    def requests(self, source: Source) -> Iterator[Request]:
        name, part, read, ends = "", 0, array("i"), list[int]()
        for record in source.records():
            book, chapter = record["id"].rpartition("/")[0], self._tokens.of(record["text"] + "\n\n")
            if ends and (book != name or len(read) + len(chapter) > CONTEXT_TOKENS):
                yield from _requests(name, part, read, ends)
                part, read, ends = part + 1, array("i"), []
            if book != name:
                name, part = book, 0
            read += chapter
            ends.append(len(read))
        yield from _requests(name, part, read, ends)

    def notes(self) -> tuple[str, ...]:
        return (f"a book is read chapter by chapter; a new text begins after {CONTEXT_TOKENS:,} tokens",)


class PromptVersions(Reader):
    """Versions of prompts, one a line: `family`, `version`, `text`. A family is a session, its versions its prompts."""

    about = "of system prompts"
    fields = ("family", "version", "text")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "family", "version", "text")

    def requests(self, source: Source) -> Iterator[Request]:
        for record in source.records():
            ids = self._tokens.header("system") + self._tokens.of(record["text"]) + self._tokens.footer()
            yield Request(str(record["family"]), ids.tobytes(), len(ids), 0, len(ids))

    def notes(self) -> tuple[str, ...]:
        return ("a version is a prompt by itself: nothing is asked, nothing generated",)


def _requests(name: str, part: int, read: array[int], ends: list[int]) -> Iterator[Request]:
    text = read.tobytes()
    for end in ends:
        yield Request(f"{name} {part}", text, end, 0, end)


def texts_of(record: Any) -> list[str]:
    """Return the passages of a record, or its one document, as a prompt contains them."""
    if "passages" in record:
        return [document_text(passage["text"], passage.get("title")) for passage in record["passages"]]
    return [document_text(record["text"], record.get("title"))]

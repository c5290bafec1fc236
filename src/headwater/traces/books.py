"""Texts that grow and get no answers: books chapter by chapter, prompts version by version."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import Reader, has
from headwater.traces.request import Request
from headwater.traces.source import Source

CONTEXT = 131_072  # tokens


class Books(Reader):
    """Books, a chapter a line in reading order: `id` (book/chapter) and `text`.

    A book is a session: each request has all chapters so far. After CONTEXT tokens the next chapter begins a new text.
    """

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "id", "text", "chapter")

    def requests(self, source: Source) -> Iterator[Request]:
        name, part, read, ends = "", 0, array("i"), list[int]()
        for record in source.records():
            book, chapter = record["id"].rpartition("/")[0], self._tokens.of(record["text"] + "\n\n")
            if ends and (book != name or len(read) + len(chapter) > CONTEXT):
                yield from _requests(name, part, read, ends)
                part, read, ends = part + 1, array("i"), []
            if book != name:
                name, part = book, 0
            read += chapter
            ends.append(len(read))
        yield from _requests(name, part, read, ends)

    def notes(self) -> tuple[str, ...]:
        return (f"a book is read chapter by chapter; a new text begins after {CONTEXT:,} tokens",)


class PromptVersions(Reader):
    """Versions of prompts, one a line: `family`, `version`, `text`. A family is a session, its versions its prompts."""

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

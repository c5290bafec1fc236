"""Books, a chapter a line in reading order: `id` (book/chapter) and `text`.

A book is a session: each request has all that was read so far. What does not fit into a model's context is read from
the next chapter on, as a text of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

CONTEXT = 131_072  # tokens


class Books:
    """A prompt of plain text, to which nothing is generated."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

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
        return (f"a book is read on chapter by chapter, and anew after {CONTEXT:,} tokens",)


def _requests(name: str, part: int, read: array[int], ends: list[int]) -> Iterator[Request]:
    text = read.tobytes()
    for end in ends:
        yield Request(f"{name} {part}", text, end, 0, end)

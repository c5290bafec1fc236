"""Versions of prompts, one a line: `family`, `version`, `text`. A family is a session, its versions follow in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens


class PromptVersions:
    """Each version is a prompt of its own, to which nothing is generated."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "family", "version", "text")

    def requests(self, source: Source) -> Iterator[Request]:
        for record in source.records():
            ids = self._tokens.header("system") + self._tokens.of(record["text"]) + self._tokens.footer()
            yield Request(str(record["family"]), ids.tobytes(), len(ids), 0, len(ids))

    def notes(self) -> tuple[str, ...]:
        return ("a version is a prompt by itself: nothing is asked, nothing generated",)

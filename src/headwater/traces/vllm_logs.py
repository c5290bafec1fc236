"""Logs of a vLLM server with --enable-log-requests."""

from __future__ import annotations

import ast
import json
import re
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from headwater.traces.reader import Reader
from headwater.traces.request import TOKEN_BYTES, Request
from headwater.traces.request_logs import SharedTexts
from headwater.traces.source import Source
from headwater.traces.tokens import Remembered, Tokens

TEXT = r"(None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"  # as Python's repr writes it
IDS = r"prompt_token_ids: (\[[\d, ]*\]|None)"
REQUEST = re.compile(rf"(?:Received request (\S+?)|Request (\S+) details): prompt: {TEXT}, (?:.*?, )??{IDS}")
NAME = re.compile(r"Received request (\S+?):")
ANSWER = re.compile(rf"Generated response (\S+?)(?: \(.*?\))?: output: {TEXT}, output_token_ids: (\[[\d, ]*\]|None)")
KNOWN = re.compile(rb"vLLM|vllm|Received request |Request \S+ details")
TIME = re.compile(r"\b(?:INFO|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
YEAR = 2000  # no year is logged; a leap year


class VllmLogs(Reader):
    """Lines `Received request ID: prompt: '...', params: ..., prompt_token_ids: [...]`, or since 0.11 at level DEBUG
    `Request ID details: prompt: '...', prompt_token_ids: [...]`, and with --enable-log-outputs `Generated response ID:
    output: '...', output_token_ids: [...]`.

    Source: github.com/vllm-project/vllm (RequestLogger).
    Inferred: no sessions: requests share what their token ids share, or their texts if no ids are logged. Prompts that
    --max-log-len cut look shorter than they were. Times are in UTC and have no year.
    """

    about = "of --enable-log-requests, with --enable-log-outputs"
    fields = ("Received request", "Request", "prompt", "prompt_token_ids")
    interleaved = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Remembered(tokens))
        self._bare = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return isinstance(first, bytes) and KNOWN.search(first) is not None

    def requests(self, source: Source) -> Iterator[Request]:
        asked: dict[str, tuple[Request, bytes]] = {}
        names: set[str] = set()
        for line in source.lines():
            text = line.decode(errors="replace")
            names.update(NAME.findall(text))
            if found := REQUEST.search(text):
                key = self._key(found[3], found[4])
                name, n = found[1] or found[2], len(key) // TOKEN_BYTES
                if n:
                    asked[name] = Request(name, key, n, 0, n, _time(text)), b""
            elif (found := ANSWER.search(text)) and found[1] in asked:
                asked[found[1]] = asked[found[1]][0], self._key(found[2], found[3])
        self._bare = len(names - asked.keys())
        texts = SharedTexts()
        for request, output in asked.values():
            texts.add(request, output, beginning=request.text[: 64 * TOKEN_BYTES])
        yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        return (f"{self._bare:,} requests without prompt or token ids are left out",) if self._bare else ()

    def _key(self, text: str, ids: str) -> bytes:
        if ids != "None":
            return array("i", json.loads(ids)).tobytes()
        return b"" if text == "None" else self._tokens.of(ast.literal_eval(text)).tobytes()


def _time(line: str) -> float | None:
    found = TIME.search(line)
    if found is None:
        return None
    month, day, hour, minute, second = map(int, found.groups())
    return datetime(YEAR, month, day, hour, minute, second, tzinfo=UTC).timestamp()

"""Reading of traces in any known format, which the first record shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headwater.cache.spelling import build
from headwater.errors import TraceError
from headwater.traces.documents import Books, Passages, PromptVersions, Stories
from headwater.traces.generated.conversation import Compacted, ForkedChains
from headwater.traces.generated.traffic import Generated
from headwater.traces.hashed_blocks import ClaudeCode, Mooncake
from headwater.traces.rag import Rag
from headwater.traces.reader import Reader
from headwater.traces.recordings import Recordings, Served
from headwater.traces.request import Request, Trace
from headwater.traces.request_logs import RequestLogs, TokenLists
from headwater.traces.sessions import Collapsed, Sessions, ShareGpt
from headwater.traces.source import MALFORMED, Source, find, name_of
from headwater.traces.tokens import Tokens, Vocabulary, Words

READERS: dict[str, type[Reader]] = {
    "recordings of headwater serve": Recordings,
    "Mooncake": Mooncake,
    "Claude Code": ClaudeCode,
    "sessions with messages": Sessions,
    "ShareGPT": ShareGpt,
    "request logs": RequestLogs,
    "token lists": TokenLists,
    "documents with questions": Stories,
    "questions with passages": Passages,
    "books": Books,
    "versions of prompts": PromptVersions,
}


class Drawing(Protocol):
    """Options of drawn traffic."""

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Draw the trace, the same for the same seed. Raises ConfigError for options, TraceError for texts."""


DRAWN: dict[str, Callable[..., Drawing]] = {
    "rag": Rag,
    "generated": Generated,
    "forked_chains": ForkedChains,
    "compacted": Compacted,
    "collapsed": Collapsed,
}


def make_trace(
    spelling: str, data: Path | None = None, tokenizer: Path | None = None, limit: int | None = None, seed: int = 0
) -> Trace:
    """Read a recorded trace (see `read_trace`), or draw one of DRAWN, spelled with its options in brackets."""
    if spelling.partition("(")[0].strip() not in DRAWN or "(" not in spelling:
        return read_trace(Path(spelling), data=data, tokenizer=tokenizer, limit=limit)
    drawn = build("trace", spelling, DRAWN).trace(spelling, tokens_of(tokenizer), data, seed)
    return replace(drawn, requests=tuple(_first(iter(drawn.requests), limit, interleaved=True)))


def read_trace(
    path: Path, *, data: Path | None = None, tokenizer: Path | None = None, limit: int | None = None
) -> Trace:
    """Read the requests of a file.

    `path` may be a name below `data`, with or without its endings, or a folder with one trace. `tokenizer` is a
    tokenizer.json or the folder of one; without it, words. `limit`: no more sessions than that, from the beginning.
    Raises TraceError, with file and line, for a malformed file.
    """
    started = time.perf_counter()
    source = Source(find(path, data))
    try:
        reader = _reader(source)(tokens_of(tokenizer))
        requests = tuple(_first(reader.requests(source), limit, reader.interleaved))
    except MALFORMED as error:
        raise source.malformed(error) from error
    if not requests:
        raise _empty(source)
    given = reader.block_tokens, reader.notes(), reader.has_token_ids
    return Trace(name_of(path), requests, *given, time.perf_counter() - started)


def served_by(spelling: str, data: Path | None) -> Served | None:
    """Return the server that recorded a trace; None for other traffic. Reads one line."""
    if spelling.partition("(")[0].strip() in DRAWN:
        return None
    source = Source(find(Path(spelling), data))
    first: Any = next(source.records(), None)
    try:
        return Served.of(first) if Recordings.matches(first) else None
    except MALFORMED as error:
        raise source.malformed(error) from error


def tokens_of(tokenizer: Path | None) -> Tokens:
    """Return a model's own tokenizer, or words."""
    return Words() if tokenizer is None else Vocabulary(tokenizer)


def _first(requests: Iterator[Request], limit: int | None, interleaved: bool) -> Iterator[Request]:
    """Yield the requests of the first `limit` sessions; stop reading once no more of them can follow."""
    sessions: set[str] = set()
    for request in requests:
        if request.prompt_tokens < 1:
            raise ValueError(f"the prompt has {request.prompt_tokens} tokens, at least 1 is needed")
        if limit is not None and len(sessions) == limit and request.session not in sessions:
            if interleaved:
                continue
            return
        sessions.add(request.session)
        yield request


def _reader(source: Source) -> type[Reader]:
    try:
        first = next(source.records())
    except StopIteration:
        raise _empty(source) from None
    for reader in READERS.values():
        if reader.matches(first):
            return reader
    known = ", ".join(READERS)
    raise source.error(f"{str(first)[:60]!r} is of no format that is known; there are {known}")


def _empty(source: Source) -> TraceError:
    return TraceError(f"{source.path} has 0 requests, at least 1 is needed")

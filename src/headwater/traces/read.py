"""Reading of traces in any known format, which the first record shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headwater.cache.spelling import build
from headwater.errors import TraceError
from headwater.traces.aiperf import AiPerf
from headwater.traces.azure import Azure
from headwater.traces.bailian import Bailian
from headwater.traces.burst_gpt import BurstGpt
from headwater.traces.claude_transcripts import ClaudeTranscripts
from headwater.traces.codex import Codex
from headwater.traces.documents import Books, Passages, PromptVersions, Stories
from headwater.traces.genai_spans import GenAiSpans
from headwater.traces.generated.conversation import Compacted, ForkedChains
from headwater.traces.generated.traffic import Generated
from headwater.traces.hashed_blocks import ClaudeCode, Mooncake
from headwater.traces.lite_llm import LiteLlm
from headwater.traces.lmsys_chat import LmsysChat
from headwater.traces.open_hands import OpenHands
from headwater.traces.openai_batch import OpenAiBatch
from headwater.traces.rag import Rag
from headwater.traces.reader import Reader
from headwater.traces.recordings import Recordings, Served
from headwater.traces.request import Request, Trace
from headwater.traces.request_logs import RequestLogs, TokenLists
from headwater.traces.sessions import Collapsed, Sessions, ShareGpt
from headwater.traces.source import MALFORMED, Source, files_of, find, name_of, stem
from headwater.traces.swe_agent import SweAgent
from headwater.traces.tokens import Tokens, Vocabulary, Words
from headwater.traces.trace_lab import TraceLab
from headwater.traces.vllm_logs import VllmLogs

NEAREST = 3  # formats that an error names
# in the order in which they are tried
READERS: dict[str, type[Reader]] = {
    "headwater recordings": Recordings,
    "Codex": Codex,
    "Claude Code": ClaudeTranscripts,
    "Claude Code in blocks": ClaudeCode,
    "TraceLab": TraceLab,
    "OpenHands": OpenHands,
    "SWE-agent": SweAgent,
    "sessions with messages": Sessions,
    "ShareGPT": ShareGpt,
    "LMSYS-Chat": LmsysChat,
    "Qwen-Bailian": Bailian,
    "Mooncake": Mooncake,
    "Azure": Azure,
    "BurstGPT": BurstGpt,
    "documents with questions": Stories,
    "questions with passages": Passages,
    "books": Books,
    "versions of prompts": PromptVersions,
    "AIPerf": AiPerf,
    "OpenAI batches": OpenAiBatch,
    "LiteLLM": LiteLlm,
    "OpenTelemetry spans": GenAiSpans,
    "vLLM logs": VllmLogs,
    "request logs": RequestLogs,
    "token lists": TokenLists,
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
    spelling: str,
    data: Path | None = None,
    tokenizer: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    block_tokens: int | None = None,
) -> Trace:
    """Read a recorded trace (see `read_trace`), or draw one of DRAWN, spelled with its options in brackets."""
    if spelling.partition("(")[0].strip() not in DRAWN or "(" not in spelling:
        return read_trace(Path(spelling), data=data, tokenizer=tokenizer, limit=limit, block_tokens=block_tokens)
    drawn = build("trace", spelling, DRAWN).trace(spelling, tokens_of(tokenizer), data, seed)
    return replace(drawn, requests=tuple(_first(iter(drawn.requests), limit, interleaved=True)))


def read_trace(
    path: Path,
    *,
    data: Path | None = None,
    tokenizer: Path | None = None,
    limit: int | None = None,
    block_tokens: int | None = None,
) -> Trace:
    """Read the requests of a file, or of a folder in which each file is a session.

    `path` may be a name below `data`, with or without its endings, or a folder with one trace. `tokenizer` is a
    tokenizer.json or the folder of one; without it, words. `limit`: no more sessions than that, from the beginning.
    `block_tokens`: of hashed blocks, if the file's are not of the format's usual size.
    Raises TraceError, with file and line, for a malformed file.
    """
    started = time.perf_counter()
    sources, kind = _sources(path, data)
    reader = kind(tokens_of(tokenizer))
    if block_tokens is not None:
        reader.read_blocks_of(block_tokens)
    requests = tuple(_first(_requests_of(reader, sources), limit, reader.interleaved))
    if not requests:
        raise _empty(sources[0])
    given = reader.block_tokens, reader.notes(), reader.has_token_ids
    return Trace(name_of(path), requests, *given, time.perf_counter() - started)


def _sources(path: Path, data: Path | None) -> tuple[list[Source], type[Reader]]:
    """Return the files of a trace and their format: one file, or those of a folder in which each is a session."""
    path = path.expanduser()
    folder = next((one for one in (path, *([data / path] if data is not None else ())) if one.is_dir()), None)
    if folder is not None:
        found = [(Source(file), _format_of(Source(file))) for file in files_of(folder)]
        for kind in (one for _, one in found if one is not None and one.is_folder):
            return [source for source, one in found if one is kind], kind
    source = Source(find(path, data))
    return [source], _reader(source)


def _requests_of(reader: Reader, sources: Sequence[Source]) -> Iterator[Request]:
    for source in sources:
        try:
            for request in reader.requests(source):
                if request.prompt_tokens < 1:
                    raise ValueError(f"the prompt has {request.prompt_tokens} tokens, at least 1 is needed")
                yield request
        except MALFORMED as error:
            raise source.malformed(error) from error


def traces_of(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, format and bytes of each trace below a folder; a folder in which each file is a session is one."""
    sessions: dict[tuple[str, str], int] = {}
    for file in files_of(folder):
        kind = _format_of(Source(file))
        name = next((name for name, reader in READERS.items() if reader is kind), None)
        if name is None or kind is None:
            continue
        if kind.is_folder:
            own = (file.relative_to(folder).parts[0] if file.parent != folder else ".", name)
            sessions[own] = sessions.get(own, 0) + file.stat().st_size
        else:
            yield (file.parent / stem(file)).relative_to(folder).as_posix(), name, file.stat().st_size
    yield from ((where, name, size) for (where, name), size in sessions.items())


def served_by(spelling: str, data: Path | None) -> Served | None:
    """Return the server that recorded a trace; None for other traffic. Reads one line."""
    if spelling.partition("(")[0].strip() in DRAWN:
        return None
    (source, *_), kind = _sources(Path(spelling), data)
    try:
        return Served.of(source.first()) if kind is Recordings else None
    except MALFORMED as error:
        raise source.malformed(error) from error


def tokens_of(tokenizer: Path | None) -> Tokens:
    """Return a model's own tokenizer, or words."""
    return Words() if tokenizer is None else Vocabulary(tokenizer)


def _first(requests: Iterator[Request], limit: int | None, interleaved: bool) -> Iterator[Request]:
    """Yield the requests of the first `limit` sessions; stop reading once no more of them can follow."""
    sessions: set[str] = set()
    for request in requests:
        if limit is not None and len(sessions) == limit and request.session not in sessions:
            if interleaved:
                continue
            return
        sessions.add(request.session)
        yield request


def _reader(source: Source) -> type[Reader]:
    try:
        first = source.first()
    except StopIteration:
        raise _empty(source) from None
    found = _matching(first)
    if found is None:
        raise source.error(_unknown(first))
    return found


def _format_of(source: Source) -> type[Reader] | None:
    """Return the format of a file; None if it is empty, or of none that is known."""
    try:
        return _matching(source.first())
    except (StopIteration, TraceError):
        return None


def _matching(first: Any) -> type[Reader] | None:
    return next((reader for reader in READERS.values() if reader.matches(first)), None)


def _unknown(first: Any) -> str:
    """Describe a first record of no known format: its fields, and the formats with most of them."""
    has = "it has no fields"
    if isinstance(first, dict) and first:
        has = f"it has {', '.join(map(repr, first))}"
    elif isinstance(first, bytes):
        first, has = first.partition(b"\n")[0].decode(errors="replace"), "it is not JSON"
    names = set(first) if isinstance(first, dict) else set(re.findall(r"[\w ]+", str(first)))
    near = sorted(READERS, key=lambda name: -len(names & {*READERS[name].fields}))[:NEAREST]
    nearest = "; ".join(f"{name} ({', '.join(READERS[name].fields)})" for name in near)
    kind = f"{str(first)[:60]!r} is of no format that is known"
    return f"{kind}: {has}; nearest are {nearest}; `headwater replay --formats` lists all"


def _empty(source: Source) -> TraceError:
    return TraceError(f"{source.path} has 0 requests, at least 1 is needed")

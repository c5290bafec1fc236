"""A trace out of a file, whatever its format: the first record tells which reader understands it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from headwater.errors import TraceError
from headwater.traces.claude_code import ClaudeCode
from headwater.traces.mooncake import Mooncake
from headwater.traces.reader import Options, Reader
from headwater.traces.request import Trace
from headwater.traces.sessions import Sessions
from headwater.traces.source import Source
from headwater.traces.token_lists import TokenLists
from headwater.traces.tokens import Vocabulary, Words

READERS: dict[str, type[Reader]] = {
    "Mooncake": Mooncake,
    "Claude Code": ClaudeCode,
    "sessions with messages": Sessions,
    "token lists": TokenLists,
}
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)  # what odd records lead to


def read_trace(
    path: Path, *, data: Path | None = None, tokenizer: Path | None = None, limit: int | None = None
) -> Trace:
    """The requests of a file.

    `path` may be a name below `data`, with or without its endings, or a folder with one trace. `tokenizer` is a
    tokenizer.json or the folder of one; without it, words. `limit`: no more requests than that, from the beginning.
    Raises TraceError, with file and line, for what cannot be understood.
    """
    started = time.perf_counter()
    source = Source(find(path, data))
    options = Options(Words() if tokenizer is None else Vocabulary(tokenizer), limit)
    try:
        reader = _reader(source)(options)
        requests = tuple(islice(reader.requests(source), limit))
    except UNREADABLE as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise source.error(f"no request that is known: {what}") from error
    if not requests:
        raise TraceError(f"{source.path} has 0 requests, at least 1 is needed")
    return Trace(_name(path), requests, reader.block_tokens, reader.notes(), time.perf_counter() - started)


def find(path: Path, data: Path | None = None) -> Path:
    """The file that a user means: as it is named, or below `data`; its endings may be missing.

    Raises TraceError where there is none, or more than one.
    """
    for candidate in (path, *([data / path] if data is not None else ())):
        found = _files(candidate)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(sorted(file.name.partition(".")[0] for file in found))
            raise TraceError(f"{candidate} is {len(found)} files, must be one of {names}")
    where = "" if data is None else f", nor below {data}"
    raise TraceError(f"{path} is no file{where}")


def _files(path: Path) -> list[Path]:
    """What a path may mean, best first: itself, a folder's only trace, names that it begins."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _traces(path, lambda stem: True)
    if not path.parent.is_dir():
        return []
    exact = _traces(path.parent, lambda stem: stem == path.name)
    return exact or _traces(path.parent, lambda stem: stem.startswith(path.name))


def _traces(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    suffixes = (".jsonl", ".json", ".trace")
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    return [file for file in files if wanted(file.name.partition(".")[0]) and set(suffixes) & set(file.suffixes)]


def _reader(source: Source) -> type[Reader]:
    records = source.records()
    first = next(records, None)
    for reader in READERS.values():
        if reader.matches(first):
            return reader
    known = ", ".join(READERS)
    raise source.error(f"{str(first)[:60]!r} is of no format that is known; there are {known}")


def _name(path: Path) -> str:
    """As the user wrote it, without endings; of a path from elsewhere, its last part."""
    stem = path.name.partition(".")[0]
    return stem if path.is_absolute() or ".." in path.parts else (path.parent / stem).as_posix()

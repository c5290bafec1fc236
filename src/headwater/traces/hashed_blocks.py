"""Recordings as hashed blocks of tokens: Mooncake's, and sessions of Claude Code."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.request import Boundaries
from headwater.traces.reader import Reader, finite, has, seconds, whole
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

SCOPE_BITS = 32  # local ids have their session's number above these bits
IDS = b'"hash_ids"'
NO_SESSIONS = "no sessions: answers are not known, so they are not cached"


class Mooncake(Reader):
    """Mooncake's traces (FAST '25), and those that AIPerf replays: a request a line, in blocks of 512 tokens.

    `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: equal ids are equal blocks at equal prefixes. The
    last block of a prompt may be partial: its id is left out. AIPerf's lines may have a `session_id`, a `delay` (ms)
    after the answer before instead of a time, and no `hash_ids`: their blocks equal no others.
    Sources: github.com/kvcache-ai/Mooncake (FAST25-release), github.com/ai-dynamo/aiperf (docs, trace replay).
    """

    about = "FAST '25, also AIPerf's: blocks of 512 tokens"
    fields = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay")
    is_sizable = True
    block_tokens = 512
    interleaved = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._unknown = self._sessions = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "input_length") and ("hash_ids" in first or "output_length" in first)

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.records()):
            length, session = whole(line, "input_length"), line.get("session_id")
            ids = line["hash_ids"] if "hash_ids" in line or session is None else self._unknown_ids(length)
            self._sessions += session is not None
            blocks = self._checked(length, len(ids))
            delay = line.get("delay")
            think = None if delay is None else finite(delay, "delay") / 1000
            text = array("q", ids[:blocks]).tobytes()
            name = str(number) if session is None else str(session)
            yield Request(name, text, length, whole(line, "output_length"), length, seconds(line), think)

    def notes(self) -> tuple[str, ...]:
        lost = f"{self._unknown:,} prompts without hash_ids share no text with others"
        return (
            "answers are not known, so they are not cached" if self._sessions else NO_SESSIONS,
            f"blocks of {self.block_tokens} tokens: only full ones count",
            *([lost] if self._unknown else []),
        )

    def _unknown_ids(self, length: int) -> list[int]:
        self._unknown += 1
        return [-(self._unknown << SCOPE_BITS) - block for block in range(-(-length // self.block_tokens))]

    def _checked(self, length: int, ids: int) -> int:
        """Return the number of full blocks. Raises ValueError for a number of ids that the length does not have."""
        full, all_blocks = length // self.block_tokens, -(-length // self.block_tokens)
        if ids not in (full, all_blocks):
            needed = f"input_length is {length:,}: {all_blocks:,} of {self.block_tokens} tokens"
            raise ValueError(f"hash_ids has {ids:,} blocks, {needed}; --block-tokens N reads blocks of N tokens")
        return full


class ClaudeCode(Reader):
    """Sessions of Claude Code in blocks of 64 tokens, one a line (kv-cache-tester's traces).

    `hash_id_scope`: ids are comparable across sessions ("global") or only within one ("local"). A request has `in`,
    `out` and `hash_ids` of its full blocks; a sub-agent is an entry with `requests` of its own and its parent's ids.
    Some recordings hold a turn twice, streamed and not: the second of such a pair is dropped.
    """

    about = "sessions as blocks of 64 tokens (kv-cache-tester)"
    fields = ("block_size", "hash_id_scope", "requests")
    block_tokens = 64

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._pairs = self._subagents = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "hash_id_scope", "requests")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.lines(), 1):
            rest, ids = without_ids(line)
            session = source.parsed(rest)
            if whole(session, "block_size") != self.block_tokens:
                raise ValueError(f"block_size is {session['block_size']:,}, must be {self.block_tokens}")
            texts = BlockTexts(number << SCOPE_BITS if session["hash_id_scope"] == "local" else 0, self.block_tokens)
            name = str(session.get("id", number))
            self._add(texts, name, session, [r for r in session["requests"] if r["type"] != "subagent"], ids)
            for entry in session["requests"]:
                if entry["type"] == "subagent":
                    self._subagents += 1
                    self._add(texts, f"{name}/{entry['agent_id']}", entry, entry["requests"], ids)
            yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        dropped = [f"{self._pairs:,} second copies of a turn were dropped"] if self._pairs else []
        agents = [f"{self._subagents:,} sub-agents are sessions of their own"] if self._subagents else []
        return (
            "blocks of 64 tokens: only full ones count",
            "an answer is known if the session's next request continues it, else it is not cached",
            "the start times of sessions are not known: they are drawn",
            *dropped,
            *agents,
        )

    def _add(
        self, texts: BlockTexts, name: str, of: Mapping[str, Any], requests: list[dict[str, Any]], ids: list[bytes]
    ) -> None:
        """Add the requests of one thread. of: the object with the lengths of its system prompt and tools."""
        before: dict[str, Any] | None = None
        system = (of.get("tool_tokens") or 0) + (of.get("system_tokens") or 0)
        for request in requests:
            raw = ids[request["hash_ids"]]
            if before is not None and before["type"] != request["type"] and ids[before["hash_ids"]] == raw:
                before, self._pairs = None, self._pairs + 1  # the pair is complete
                continue
            before = request
            think = request.get("think_time")
            n_in, n_out = whole(request, "in"), whole(request, "out")
            texts.add(name, raw, n_in, n_out, None if think is None else finite(think, "think_time"), system)


def without_ids(line: bytes) -> tuple[bytes, list[bytes]]:
    """Return the line with each list of ids replaced by its number, and the lists, not parsed.

    Parsing 70 million numbers would take ten times as long as the rest, and most of them repeat the request before.
    """
    parts: list[bytes] = []
    lists: list[bytes] = []
    at = 0
    while (found := line.find(IDS, at)) >= 0:
        begin = line.index(b"[", found) + 1
        end = line.index(b"]", begin)
        parts += [line[at : begin - 1], b"%d" % len(lists)]
        lists.append(line[begin:end])
        at = end + 1
    return b"".join([*parts, line[at:]]), lists


@dataclass(slots=True)
class _Text:
    """Block ids shared by the requests of a thread that extend each other: those of the longest."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    packed: bytes = b""


@dataclass(slots=True)
class _Thread:
    raw: bytes = b""  # the last request's ids, as text
    text: _Text = field(default_factory=_Text)
    last: int | None = None  # number of the last request among all


class BlockTexts:
    """Requests of one session and of its sub-agents. `base` is added to each id."""

    def __init__(self, base: int, block_tokens: int) -> None:
        self._base, self._block = base, block_tokens
        self._threads: dict[str, _Thread] = {}
        self._asked: list[tuple[Request, _Text]] = []

    def add(
        self,
        session: str,
        raw: bytes,
        n_in: int,
        n_out: int,
        think: float | None,
        system: int,
        at: float | None = None,
    ) -> None:
        """Add a request. raw: ids of the prompt's full blocks, comma-separated. system: tokens of system and tools.

        The output of the previous request is known up to where this prompt continues it.
        """
        thread = self._threads.setdefault(session, _Thread())
        common, more = self._read(raw, thread)
        if common == len(thread.text.ids):
            thread.text.ids += more
            if thread.last is not None and common:
                self._extend(thread.last, len(thread.text.ids))
        else:
            thread.text = _Text(thread.text.ids[:common] + more)
        blocks = len(thread.text.ids)
        if blocks < n_in // self._block:
            raise ValueError(f"hash_ids has {blocks:,} blocks, in is {n_in:,}: {n_in // self._block:,}")
        parts = Boundaries(system_end=system if 0 < system < n_in else None)
        thread.raw, thread.last = raw, len(self._asked)
        self._asked.append((Request(session, b"", n_in, n_out, n_in, at, think, parts), thread.text))

    def requests(self) -> Iterator[Request]:
        """Yield all requests; called when all have been added."""
        for request, text in self._asked:
            text.packed = text.packed or text.ids.tobytes()
            yield replace(request, text=text.packed)

    def _extend(self, number: int, blocks: int) -> None:
        """Note that the thread continues this request with a prompt of `blocks`."""
        request, text = self._asked[number]
        end = request.prompt_tokens + request.output_tokens
        known = max(request.prompt_tokens, min(end, blocks * self._block))
        self._asked[number] = replace(request, known_tokens=known), text

    def _read(self, raw: bytes, thread: _Thread) -> tuple[int, array[int]]:
        """Return the number of leading blocks shared with the previous request, and the ids of the others."""
        end = _common_prefix(raw, thread.raw)
        if not (_ends_number(raw, end) and _ends_number(thread.raw, end)):
            end = raw.rfind(b",", 0, end)
        if end <= 0:
            return 0, self._parsed(raw)
        return raw.count(b",", 0, end) + 1, self._parsed(raw[end + 1 :])

    def _parsed(self, raw: bytes) -> array[int]:
        base = self._base
        return array("q", [base + number for number in json.loads(b"[%b]" % raw)])


def _ends_number(raw: bytes, at: int) -> bool:
    return raw[at : at + 1] in (b"", b",")


def _common_prefix(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix in bytes, by bisection with memcmp."""
    if a.startswith(b):
        return len(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

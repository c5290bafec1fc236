"""Texts of hashed blocks of one session's threads: long, and mostly what the request before had."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.request import Boundaries
from headwater.traces.request import Request


@dataclass(slots=True)
class _Text:
    """Ids of those requests of a thread that extend each other, as many as the longest has."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    packed: bytes = b""


@dataclass(slots=True)
class _Asked:
    session: str
    text: _Text
    prompt_tokens: int
    output_tokens: int
    known_tokens: int
    think: float | None
    boundaries: Boundaries


@dataclass(slots=True)
class _Thread:
    raw: bytes = b""  # the last request's ids, as they were written
    text: _Text = field(default_factory=_Text)
    last: _Asked | None = None


class BlockTexts:
    """Requests of one session and of its sub-agents. `base` is added to each id."""

    def __init__(self, base: int, block_tokens: int) -> None:
        self._base, self._block = base, block_tokens
        self._threads: dict[str, _Thread] = {}
        self._asked: list[_Asked] = []

    def add(self, session: str, raw: bytes, n_in: int, n_out: int, think: float | None, system: int) -> None:
        """`raw`: ids of the prompt's full blocks with commas between. `system`: tokens of system prompt and tools.

        What the request before generated is known as far as this prompt goes on from that one's.
        """
        thread = self._threads.setdefault(session, _Thread())
        common, more = self._read(raw, thread)
        if common == len(thread.text.ids):
            thread.text.ids += more
            if thread.last is not None and common:
                thread.last.known_tokens = self._known(thread.last, len(thread.text.ids))
        else:
            thread.text = _Text(thread.text.ids[:common] + more)
        blocks = len(thread.text.ids)
        if blocks < n_in // self._block:
            raise ValueError(f"hash_ids has {blocks:,} blocks, in is {n_in:,}: {n_in // self._block:,}")
        thread.raw = raw
        parts = Boundaries(system_end=system if 0 < system < n_in else None)
        thread.last = _Asked(session, thread.text, n_in, n_out, n_in, think, parts)
        self._asked.append(thread.last)

    def requests(self) -> Iterator[Request]:
        for one in self._asked:
            one.text.packed = one.text.packed or one.text.ids.tobytes()
            known = one.prompt_tokens, one.output_tokens, one.known_tokens
            yield Request(one.session, one.text.packed, *known, think=one.think, boundaries=one.boundaries)

    def _known(self, one: _Asked, blocks: int) -> int:
        return max(one.prompt_tokens, min(one.prompt_tokens + one.output_tokens, blocks * self._block))

    def _read(self, raw: bytes, thread: _Thread) -> tuple[int, array[int]]:
        """How many blocks are those of the request before, and the ids of the others."""
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
    """Length in bytes, by bisection: each comparison is a memcmp of what is still open."""
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
